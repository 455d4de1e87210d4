"""Reading of a quantized cache by attention in decoding, simulated in one pass over a text.

Tokens are quantized a group at a time (:class:`surgery.model.quantized_cache.QuantizedKVLayer`), so a query reads the
quantized values of complete groups and the latest tokens, and the first, as they came. In one pass every query finds
both forms side by side and a mask says which it reads: as if tokens came one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surgery.families.anatomy import LayerAnatomy
from surgery.families.attention import cached_heads, expanded_heads, latent_cache, output
from surgery.families.latent_anatomy import LatentAnatomy
from surgery.families.softmax import Softmax
from surgery.model.quantized_cache import QuantizedKVLayer


def as_quantized(cache: QuantizedKVLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, T, ·] of a text as an empty cache of such a format would give them back at its end.

    Rounding has no slope of use: gradients pass as if nothing were rounded (the straight-through estimator of Bengio et
    al., arXiv:1308.3432).
    """
    with torch.no_grad():
        read_back = QuantizedKVLayer(*cache.settings()).update(keys, values)
    if not (torch.is_grad_enabled() and keys.requires_grad):
        return read_back
    return tuple(exact + (read - exact).detach() for exact, read in zip((keys, values), read_back, strict=True))


def seen_as_they_came(cache: QuantizedKVLayer, tokens: int, device: torch.device) -> Tensor:
    """Return the mask of earlier tokens that each query reads exactly, bool [T, T]; its own group may end with it."""
    place = torch.arange(tokens, device=device)
    behind = place - cache.sinks
    complete = (behind + 1 - cache.window).clamp_min(0).div(cache.group, rounding_mode="floor") * cache.group
    return (behind < 0) | (behind >= complete[:, None])


class QuantizedAttention(nn.Module):
    """Stands in for a transformers attention module that reads its keys and values quantized; prompts only.

    Args:
        anatomy: without a sliding window.
        cache: an empty layer that says how tokens are kept.
    """

    def __init__(self, anatomy: LayerAnatomy, cache: QuantizedKVLayer):
        super().__init__()
        self.anatomy, self.cache = anatomy, cache

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        anatomy, projection = self.anatomy, self.anatomy.project(hidden_states)
        if isinstance(anatomy, LatentAnatomy):
            queries, *cached = latent_cache(anatomy, projection)
            exact, quantized = (expanded_heads(anatomy, *form) for form in (cached, as_quantized(self.cache, *cached)))
            attn_output = attend_quantized(self.cache, anatomy.softmax, queries, exact, quantized)
            return output(anatomy, attn_output.transpose(1, 2), hidden_states), None
        return output(
            anatomy, read_quantized(self.cache, anatomy.softmax, *cached_heads(anatomy, projection)), hidden_states
        ), None


def read_quantized(cache: QuantizedKVLayer, softmax: Softmax, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Mixed values [B, T, H, e] of queries [B, H, T, d] that read keys and values [B, G, T, ·] from such a cache."""
    quantized = as_quantized(cache, keys, values)
    return attend_quantized(cache, softmax, queries, (keys, values), quantized).transpose(1, 2)


def attend_quantized(
    cache: QuantizedKVLayer,
    softmax: Softmax,
    queries: Tensor,
    exact: tuple[Tensor, Tensor],
    quantized: tuple[Tensor, Tensor],
) -> Tensor:
    """Mixed values [B, H, T, e] of queries [B, H, T, d] that read keys and values [B, G, T, ·] in either form."""
    tokens, device = queries.shape[-2], queries.device
    place = torch.arange(tokens, device=device)
    visible, as_it_came = place[:, None] >= place, seen_as_they_came(cache, tokens, device)
    keys, values = (torch.cat(both, dim=-2) for both in zip(quantized, exact, strict=True))
    return softmax.mix(queries, keys, values, torch.cat([visible & ~as_it_came, visible & as_it_came], dim=-1))
