"""Prefill of MLA with keys and values expanded from latents to heads.

The absorbed form has queries of width r + ρ and values of width r; heads of the source have width d. Decoding is
memory-bound and reads latents. Prefill is compute-bound, so the keys and values of one layer at a time are expanded, as
in DeepSeek-V2 (arXiv:2405.04434, section 2.1). Keys are rotated per head, which gives the same scores as the absorbed
form if the weights have `HeadPairs`.

Shapes: B batch, T new tokens, S tokens in the cache, H query heads, K expanded heads, d head_dim, v value head_dim, r
kv_lora_rank, ρ width of the shared RoPE key.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
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
    """Compute attention over expanded keys and values: outputs [B, T, H, v] and, if eager, weights [B, H, T, S].

    Args:
        order: channel order of the layer's weights.
        module: attention module with `query_up` and `value_up`, passed to `attend`.
        query: [B, H, T, d], not rotated.
        latents: latents and shared keys of all tokens [B, 1, S, r + ρ], not rotated.
        gains: empty, or one tensor [B, 1, S, G] that scales the keys (inverse rms of a key norm).
        angles: cos and sin [B, 1, S, ρ/2] of all component pairs; the last T positions are those of the queries.
        mask: attention mask for `attend`.
    """
    num_tokens = query.shape[2]
    cos, sin = angles[0][..., order.pairs], angles[1][..., order.pairs]
    query = _rotated(order, query[..., order.channels], cos[..., -num_tokens:, :], sin[..., -num_tokens:, :])
    group_size = module.num_heads // order.heads
    key_up, value_up = module.query_up[::group_size, order.channels], module.value_up[::group_size]
    key = _rotated(order, torch.einsum("bsc,kdc->bksd", latents[:, 0], key_up), cos, sin)
    value = torch.einsum("bsr,kvr->bksv", latents[:, 0, :, : value_up.shape[-1]], value_up)
    for gain in gains:
        gain = gain.permute(0, 3, 2, 1)
        key = key * gain.repeat_interleave(key.shape[1] // gain.shape[1], dim=1)
    return attend(_WithGroups(module, group_size), query, key, value, mask, **kwargs)


def _rotated(order: HeadPairs, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [B, ·, ·, d] with channels in the given order."""
    turning, still = heads.split((2 * len(order.pairs), heads.shape[-1] - 2 * len(order.pairs)), dim=-1)
    return torch.cat((rotate_pairs(turning, cos, sin), still), dim=-1)


class _WithGroups:
    """Proxy of an attention module with another `num_key_value_groups`, which transformers' attention reads."""

    def __init__(self, module: nn.Module, num_key_value_groups: int):
        self._module, self.num_key_value_groups = module, num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
