"""`gqa_decode_quantized`: the operator, registered with PyTorch as `surgery::gqa_decode_quantized`."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from surgery.kernels.checks import check_counts, check_heads, check_keys, check_positive
from surgery.kernels.gqa_decode_quantized.reference import quantized_attention
from surgery.kernels.operation import Operation, attention_outputs
from surgery.kernels.quantization import BITS


def gqa_decode_quantized(
    query: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    key_zero: Tensor | None,
    value_codes: Tensor,
    value_scale: Tensor,
    value_zero: Tensor | None,
    scale: float,
    *,
    format: str,
    group: int,
    keys: str = "channel",
    lengths: Tensor | None = None,
    coded: Tensor | None = None,
    starts: Tensor | None = None,
    window: int | None = None,
    behind: int = 0,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Grouped-query attention of the last T tokens of each row over those of its tokens that are quantized.

    Quantized are the first tokens of a row. What follows them exactly, `gqa_decode` reads (lengths and starts less the
    tokens before), and `merge_parts` makes one result of both.

    Args:
        query: [B, T, H, d], rotated; query t of a row stands at `length - T + t` of all its tokens.
        key_codes: uint8 [B, G, S·bits/8, d], consecutive tokens in a byte, the first in its lowest bits.
        key_scale: by channel [B, G, S/group, d], by token [B, G, S, groups of d], in the query's dtype.
        key_zero: like `key_scale`; None of fp8.
        value_codes: uint8 [B, G, S·bits/8, v].
        value_scale, value_zero: by token, [B, G, S, groups of v].
        scale: multiplies the logits.
        format: of a code: int8, int4, int2 (a value is code · scale + zero) or fp8 (e4m3 code · scale).
        group: tokens that share a scale of keys by channel.
        keys: what shares a scale of keys: "channel" or "token".
        lengths: int32 [B] on the device, tokens of each row, quantized or not, new ones included; None is S + behind.
        coded: int32 [B] on the device, how many of them are quantized; None is all S, or the length if it is less.
        starts: int32 [B] on the device, the first token of each row that is no padding; None is 0.
        window: latest tokens that a query sees, itself included; None for all.
        behind: tokens that follow the quantized ones, where no lengths are given.
        splits: programs that share the tokens of a row; None chooses by the shapes.

    Returns:
        out [B, T, H, v] in the query's dtype, and lse [B, T, H] fp32 (float64 of float64): the natural logarithm of the
        sum of exponentials of the scaled logits. Where there is nothing to see they are 0 and -∞.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit together.
    """
    if behind < 0:
        raise ValueError(f"gqa_decode_quantized: {behind} tokens behind the codes")
    codes = (key_codes, key_scale, key_zero, value_codes, value_scale, value_zero)
    return _quantized(query, *codes, scale, format, group, keys, lengths, coded, starts, window, behind, splits)


def _check(call: SimpleNamespace) -> None:
    query, key_codes, value_codes = call.query, call.key_codes, call.value_codes
    format, group, keys = call.format, call.group, call.keys
    name = "gqa_decode_quantized"
    check_keys(name, query, key_codes, value_codes)
    check_heads(name, query.shape[2], key_codes.shape[1])
    if format not in BITS or keys not in ("channel", "token"):
        raise ValueError(f"{name}: codes of {format!r}, keys by {keys!r}: {', '.join(BITS)} by channel or token only")
    check_positive(name, group=group, window=call.window, splits=call.splits)
    rows, groups = key_codes.shape[:2]
    tokens = key_codes.shape[2] * 8 // BITS[format]
    if query.shape[0] != rows:
        raise ValueError(f"{name}: {query.shape[0]} rows of queries, {rows} of keys")
    if not key_codes.dtype == value_codes.dtype == torch.uint8:
        raise ValueError(f"{name}: {key_codes.dtype} and {value_codes.dtype} codes: uint8 is needed")
    if keys == "channel" and (tokens % group or group * BITS[format] % 8):
        raise ValueError(f"{name}: {tokens} tokens of {format} in groups of {group}: whole groups of whole bytes only")
    by_channel = (rows, groups, tokens // group, query.shape[-1])
    shapes = {"keys": by_channel if keys == "channel" else (rows, groups, tokens), "values": (rows, groups, tokens)}
    scales = (("keys", call.key_scale, call.key_zero), ("values", call.value_scale, call.value_zero))
    for what, scale_of, zero in scales:
        if scale_of.dim() != 4 or scale_of.shape[: len(shapes[what])] != shapes[what] or not scale_of.shape[3]:
            raise ValueError(f"{name}: scales of {what} {tuple(scale_of.shape)} for {tokens} tokens and group {group}")
        if (zero is None) != (format == "fp8"):
            raise ValueError(f"{name}: zero points of {what}: integers need them, fp8 has none")
        if zero is not None and zero.shape != scale_of.shape:
            raise ValueError(f"{name}: zero points of {what} {tuple(zero.shape)}, scales {tuple(scale_of.shape)}")
        if scale_of.dtype != query.dtype or (zero is not None and zero.dtype != query.dtype):
            raise ValueError(f"{name}: scales of {what} in {scale_of.dtype}, queries in {query.dtype}")
    check_counts(name, rows, lengths=call.lengths, coded=call.coded, starts=call.starts)


def _unsupported(call: SimpleNamespace) -> str | None:
    from surgery.kernels.gqa_decode_quantized.kernel import config_of, step_tokens

    query, value_codes, value_scale = call.query, call.value_codes, call.value_scale
    if call.key_codes.stride(-1) != 1 or value_codes.stride(-1) != 1:
        return "the codes of a token do not lie side by side"
    for tensor in (call.key_scale, call.key_zero, value_scale, call.value_zero):
        if tensor is not None and tensor.stride()[2:] != (tensor.shape[3], 1):
            return "the scales of tokens do not lie side by side"
    for zero, factor in ((call.key_zero, call.key_scale), (call.value_zero, value_scale)):
        if zero is not None and zero.stride() != factor.stride():
            return "zero points lie otherwise than scales"
    places = (value_codes.shape[-1], value_codes.data_ptr(), *value_codes.stride()[:3])
    if any(place % 2 for place in places):
        return "values of an odd number of channels"
    widest = max(query.shape[-1], value_codes.shape[-1])
    if widest > 256 or value_scale.shape[-1] > 16:
        return f"heads of {widest} numbers in {value_scale.shape[-1]} groups"
    form = (call.format, call.group, call.keys)
    if step_tokens(config_of(query, value_scale, *form), *form) is None:
        return f"keys in groups of {call.group} tokens"
    return None


_quantized = Operation(
    "gqa_decode_quantized",
    quantized_attention,
    lambda call: attention_outputs(call.query, call.value_codes.shape[-1]),
    _unsupported,
    _check,
    settings=("splits",),
    growth=(dict.fromkeys(("key_codes", "value_codes", "key_scale", "key_zero", "value_scale", "value_zero"), 2),),
    free=("behind",),
)
