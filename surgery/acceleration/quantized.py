"""Steps of decoding over quantized caches: read as they are stored, the exact tokens behind them beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from surgery.acceleration.masks import row_bounds
from surgery.acceleration.steps import is_step
from surgery.kernels.gqa_decode.operator import gqa_decode
from surgery.kernels.gqa_decode_quantized.operator import gqa_decode_quantized
from surgery.kernels.merge_parts import merge_parts
from surgery.model.cache_argument import CACHE
from surgery.model.quantized_cache import QuantizedKVLayer

QuantizedKeys = QuantizedKVLayer
"""Result of a quantized layer's update in the place of keys and of values: the layer itself."""


def ask_for_quantized(module: nn.Module, args: tuple, call: dict[str, Any]) -> None:
    """Forward pre-hook of an attention: its cache layer hands on quantized values where kernels will read them."""
    cache = call.get(CACHE)
    layer = None if cache is None or module.layer_idx >= len(cache.layers) else cache.layers[module.layer_idx]
    if isinstance(layer, QuantizedKVLayer):
        states = call["hidden_states"] if "hidden_states" in call else args[0]
        layer.hands_on_codes = layer.of_one_format and is_step(module, states, states.shape[1])


def quantized_attention(query: Tensor, layer: QuantizedKVLayer, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of query [B, H, T, d] over all tokens of a layer, [B, T, H, v]; mask as `row_bounds` takes it."""
    layer.hands_on_codes = False
    query = query.transpose(1, 2)
    keys, values, exact = layer.key_codes, layer.value_codes, layer.keys.shape[-2]
    _, starts = row_bounds(mask, len(query), query.shape[1], exact + keys.tokens, query.device)

    def exact_part() -> tuple[Tensor, Tensor]:
        behind = None if starts is None else (starts - keys.tokens).clamp(min=0)
        return gqa_decode(query, layer.keys, layer.values, scale, starts=behind)

    def quantized_part() -> tuple[Tensor, Tensor]:
        return gqa_decode_quantized(
            query,
            keys.codes,
            keys.scale,
            keys.zero,
            values.codes,
            values.scale,
            values.zero,
            scale,
            format=layer.format,
            group=layer.group,
            keys=layer.keys_by,
            starts=starts,
            behind=exact,
        )

    return of_both(layer, exact_part, quantized_part)


def of_both(
    layer: QuantizedKVLayer,
    exact_part: Callable[[], tuple[Tensor, Tensor]],
    quantized_part: Callable[[], tuple[Tensor, Tensor]],
) -> Tensor:
    """The out of a layer's quantized tokens and of the exact ones behind them, where it has either.

    Args:
        exact_part, quantized_part: give (out, lse) of theirs, and are called if there are such tokens.
    """
    parts = [exact_part()] if layer.keys.shape[-2] else []
    parts += [quantized_part()] if layer.key_codes.tokens else []
    outs, logs = zip(*parts, strict=True)
    return outs[0] if len(parts) == 1 else merge_parts(outs, logs)[0]
