"""Keys and values of a layer's heads, expanded from its latents: what a prompt reads.

In the absorbed form a query is r + ρ wide and its values are r wide, in a head of the source both are d wide. A step of
decoding waits for bytes, so it reads latents; a prompt waits for operations, so one layer's keys and values are
expanded while it is read, as in prefills of DeepSeek-V2 (arXiv:2405.04434, section 2.1).

Queries are rotated in the latent space. Keys of heads are rotated in theirs, which gives the same scores where
`query_up` commutes with the rotation: where it takes each pair of a head's channels, as a complex number, to component
pairs of one frequency by complex factors. Conversions write such weights; weights that were trained freely are not.

Shapes: B batch, T new tokens, S tokens in the cache, H query heads, K heads that are expanded, d head_dim, v its width
in values, r kv_lora_rank, ρ width of the shared RoPE key.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention_functions import attend, rotate_pairs


class ExpandedHeads(NamedTuple):
    """Order of a layer's heads that expands their keys and values.

    Attributes:
        channels: of a head [d]: pairs that rotate first, real and imaginary, then the others.
        pairs: component pair [p] whose frequency each pair of channels has.
        heads: K, those of the source's keys and values, or H where query heads have weights of their own.
    """

    channels: Tensor
    pairs: Tensor
    heads: int

    @classmethod
    def of(cls, query_up: Tensor, value_up: Tensor, groups: int, turns: list) -> ExpandedHeads | None:
        """Make them of query_up [H, d, r + ρ] and value_up [H, v, r]; None where keys cannot be rotated as heads.

        Reads the weights on the host.

        Args:
            groups: KV heads of the source. Their query heads share keys and values unless training set them apart.
            turns: of each of the ρ/2 component pairs, what decides its rotation; equal ones turn alike.
        """
        factors = torch.view_as_complex(
            query_up[..., value_up.shape[-1] :].detach().cpu().float().unflatten(-1, (-1, 2)).contiguous()
        )  # [H, d, ρ/2]
        links = (factors != 0).any(dim=0)
        real, imaginary, pairs = [], [], []
        partners: dict[tuple[int, ...], list[int]] = {}
        for channel, row in enumerate(links):
            partners.setdefault(tuple(row.nonzero().flatten().tolist()), []).append(channel)
        still = partners.pop((), [])
        if (links.sum(dim=0) > 2).any():
            return None
        for components, channels in partners.items():
            if len(channels) != 2 or any(turns[each] != turns[components[0]] for each in components):
                return None
            first, second = channels
            if torch.equal(factors[:, second], 1j * factors[:, first]):
                real, imaginary = [*real, first], [*imaginary, second]
            elif torch.equal(factors[:, first], 1j * factors[:, second]):
                real, imaginary = [*real, second], [*imaginary, first]
            else:
                return None
            pairs.append(components[0])
        order = [channel for pair in zip(real, imaginary, strict=True) for channel in pair] + still
        by_group = [weight.detach().unflatten(0, (groups, -1)) for weight in (query_up, value_up)]
        shared = all(torch.equal(weight, weight[:, :1].expand_as(weight)) for weight in by_group)
        channels, pairs = (torch.tensor(each, dtype=torch.long, device=query_up.device) for each in (order, pairs))
        return cls(channels, pairs, groups if shared else len(query_up))

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        latents: Tensor,
        gains: list[Tensor],
        angles: tuple[Tensor, Tensor],
        mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs [B, T, H, v] and, if eager, weights [B, H, T, S].

        Args:
            module: the attention layer, with `query_up` and `value_up`, as `attend` reads it.
            query: [B, H, T, d], not rotated.
            latents: of all tokens, [B, 1, S, r + ρ], not rotated.
            gains: nothing, or one tensor [B, 1, S, G] of factors of the source's keys.
            angles: cos and sin of all component pairs, [B, 1, S, ρ/2]; those of the queries are the last T.
            mask: as `attend` takes it.
        """
        num_tokens = query.shape[2]
        cos, sin = angles[0][..., self.pairs], angles[1][..., self.pairs]
        query = self._rotated(query[..., self.channels], cos[..., -num_tokens:, :], sin[..., -num_tokens:, :])
        each = module.num_heads // self.heads
        key_up, value_up = module.query_up[::each, self.channels], module.value_up[::each]
        key = self._rotated(torch.einsum("bsc,kdc->bksd", latents[:, 0], key_up), cos, sin)
        value = torch.einsum("bsr,kvr->bksv", latents[:, 0, :, : value_up.shape[-1]], value_up)
        for gain in gains:
            gain = gain.permute(0, 3, 2, 1)
            key = key * gain.repeat_interleave(key.shape[1] // gain.shape[1], dim=1)
        return attend(_WithGroups(module, each), query, key, value, mask, **kwargs)

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads [B, ·, ·, d], channels in order, rotated."""
        turning, still = heads.split((2 * len(self.pairs), heads.shape[-1] - 2 * len(self.pairs)), dim=-1)
        return torch.cat((rotate_pairs(turning, cos, sin), still), dim=-1)


class _WithGroups:
    """An attention layer whose keys are shared by another number of query heads, which transformers asks it for."""

    def __init__(self, module: nn.Module, num_key_value_groups: int):
        self._module, self.num_key_value_groups = module, num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
