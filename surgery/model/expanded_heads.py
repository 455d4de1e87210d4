"""Keys and values of a layer's heads, expanded from its latents: what a prompt reads.

In the absorbed form a query is r + ρ wide and its values are r wide, in a head of the source both are d wide. A step of
decoding waits for bytes, so it reads latents; a prompt waits for operations, so one layer's keys and values are
expanded while it is read, as in prefills of DeepSeek-V2 (arXiv:2405.04434, section 2.1). Keys are rotated as heads,
which gives the scores of the absorbed form where there are `HeadPairs`.

Shapes: B batch, T new tokens, S tokens in the cache, H query heads, K heads that are expanded, d head_dim, v its width
in values, r kv_lora_rank, ρ width of the shared RoPE key.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention_functions import attend, rotate_pairs
from .head_pairs import HeadPairs


def attend_expanded(
    order: HeadPairs,
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
        order: of the layer's weights.
        module: the attention layer, with `query_up` and `value_up`, as `attend` reads it.
        query: [B, H, T, d], not rotated.
        latents: of all tokens, [B, 1, S, r + ρ], not rotated.
        gains: nothing, or one tensor [B, 1, S, G] of factors of the source's keys.
        angles: cos and sin of all component pairs, [B, 1, S, ρ/2]; those of the queries are the last T.
        mask: as `attend` takes it.
    """
    num_tokens = query.shape[2]
    cos, sin = angles[0][..., order.pairs], angles[1][..., order.pairs]
    query = _rotated(order, query[..., order.channels], cos[..., -num_tokens:, :], sin[..., -num_tokens:, :])
    each = module.num_heads // order.heads
    key_up, value_up = module.query_up[::each, order.channels], module.value_up[::each]
    key = _rotated(order, torch.einsum("bsc,kdc->bksd", latents[:, 0], key_up), cos, sin)
    value = torch.einsum("bsr,kvr->bksv", latents[:, 0, :, : value_up.shape[-1]], value_up)
    for gain in gains:
        gain = gain.permute(0, 3, 2, 1)
        key = key * gain.repeat_interleave(key.shape[1] // gain.shape[1], dim=1)
    return attend(_WithGroups(module, each), query, key, value, mask, **kwargs)


def _rotated(order: HeadPairs, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [B, ·, ·, d], channels in order, rotated."""
    turning, still = heads.split((2 * len(order.pairs), heads.shape[-1] - 2 * len(order.pairs)), dim=-1)
    return torch.cat((rotate_pairs(turning, cos, sin), still), dim=-1)


class _WithGroups:
    """An attention layer whose keys are shared by another number of query heads, which transformers asks it for."""

    def __init__(self, module: nn.Module, num_key_value_groups: int):
        self._module, self.num_key_value_groups = module, num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
