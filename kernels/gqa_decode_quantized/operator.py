"""`gqa_decode_quantized`: the operator, registered with PyTorch as `surgery::gqa_decode_quantized`."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.backend import refusal, tell_once
from surgery.kernels.gqa_decode.operator import check_heads, check_numbers, check_rows, side_by_side
from surgery.kernels.gqa_decode_quantized.reference import BITS, quantized_attention
from surgery.kernels.launch import Config
from surgery.kernels.reference_gradient import differentiate_by
from surgery.kernels.tuned import key_of, tuned


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
    """Grouped-query attention of the last T tokens of each row over those of its tokens that are held as codes.

    The codes are the first tokens of a row. What follows them exactly, `gqa_decode` reads (lengths and starts less the
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
        lengths: int32 [B] on the device, tokens of each row, codes or not, the new ones included; None is S + behind.
        coded: int32 [B] on the device, how many of them are held as codes; None is all S, or the length if it is less.
        starts: int32 [B] on the device, the first token of each row that is no padding; None is 0.
        window: latest tokens that a query sees, itself included; None for all.
        behind: tokens that follow the codes, where no lengths are given.
        splits: programs that share the tokens of a row; None chooses by the shapes.

    Returns:
        out [B, T, H, v] in the query's dtype, and lse [B, T, H] fp32 (float64 of float64): the natural logarithm of the
        sum of exponentials of the scaled logits. Where there is nothing to see they are 0 and -∞.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit together.
    """
    name = "gqa_decode_quantized"
    check_heads(name, query, key_codes, value_codes)
    if format not in BITS or keys not in ("channel", "token"):
        raise ValueError(f"{name}: codes of {format!r}, keys by {keys!r}: {', '.join(BITS)} by channel or token only")
    check_numbers(name, group=group, window=window, splits=splits, behind=behind + 1)
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
    for what, scale_of, zero in (("keys", key_scale, key_zero), ("values", value_scale, value_zero)):
        if scale_of.dim() != 4 or scale_of.shape[: len(shapes[what])] != shapes[what] or not scale_of.shape[3]:
            raise ValueError(f"{name}: scales of {what} {tuple(scale_of.shape)} for {tokens} tokens and group {group}")
        if (zero is None) != (format == "fp8"):
            raise ValueError(f"{name}: zero points of {what}: integers need them, fp8 has none")
        if zero is not None and zero.shape != scale_of.shape:
            raise ValueError(f"{name}: zero points of {what} {tuple(zero.shape)}, scales {tuple(scale_of.shape)}")
        if scale_of.dtype != query.dtype or (zero is not None and zero.dtype != query.dtype):
            raise ValueError(f"{name}: scales of {what} in {scale_of.dtype}, queries in {query.dtype}")
    check_rows(name, rows, lengths=lengths, coded=coded, starts=starts)
    codes = (key_codes, key_scale, key_zero, value_codes, value_scale, value_zero)
    return _quantized(query, *codes, scale, format, group, keys, lengths, coded, starts, window, behind, splits)


def _reference(*arguments: object) -> tuple[Tensor, Tensor]:
    return quantized_attention(*arguments[:-1])


@torch.library.custom_op("surgery::gqa_decode_quantized", mutates_args=())
def _quantized(
    query: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    key_zero: Tensor | None,
    value_codes: Tensor,
    value_scale: Tensor,
    value_zero: Tensor | None,
    scale: float,
    format: str,
    group: int,
    keys: str,
    lengths: Tensor | None,
    coded: Tensor | None,
    starts: Tensor | None,
    window: int | None,
    behind: int,
    splits: int | None,
) -> tuple[Tensor, Tensor]:
    codes = (key_codes, key_scale, key_zero, value_codes, value_scale, value_zero)
    counts = (lengths, coded, starts)
    reason = refusal(query, *codes, *counts) or _unsupported(query, *codes, format, group, keys)
    if reason:
        tell_once("gqa_decode_quantized", reason)
        return _reference(query, *codes, scale, format, group, keys, *counts, window, behind, splits)
    from surgery.kernels.gqa_decode.kernel import scratch
    from surgery.kernels.gqa_decode_quantized.kernel import default_splits, launches

    config = _config(query, key_codes, value_scale, format, group, keys)
    out, lse = _outputs(query, value_codes.shape[-1])
    parts, logs = scratch(query, out.shape[-1], splits or default_splits(query, value_scale, window, config))
    for launch in launches(
        side_by_side(query),
        *codes,
        scale,
        out,
        lse,
        parts,
        logs,
        format=format,
        group=group,
        keys=keys,
        lengths=side_by_side(lengths),
        coded=side_by_side(coded),
        starts=side_by_side(starts),
        window=window,
        behind=behind,
        config=config,
    ):
        launch.run()
    return out, lse


def _config(query: Tensor, key_codes: Tensor, value_scale: Tensor, format: str, group: int, keys: str) -> Config:
    from surgery.kernels.gqa_decode_quantized.kernel import default_config

    shape = key_of(
        tokens=query.shape[1],
        heads=query.shape[2],
        groups=key_codes.shape[1],
        d=query.shape[-1],
        value_groups=value_scale.shape[-1],
        format=format,
        group=group,
        keys=keys,
        dtype=query.dtype,
    )
    default = default_config(query, value_scale, group, keys)
    return tuned("gqa_decode_quantized", shape, query.device, default)


def _unsupported(
    query: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    key_zero: Tensor | None,
    value_codes: Tensor,
    value_scale: Tensor,
    value_zero: Tensor | None,
    format: str,
    group: int,
    keys: str,
) -> str | None:
    from surgery.kernels.gqa_decode_quantized.kernel import step_tokens

    if key_codes.stride(-1) != 1 or value_codes.stride(-1) != 1:
        return "the codes of a token do not lie side by side"
    for tensor in (key_scale, key_zero, value_scale, value_zero):
        if tensor is not None and tensor.stride()[2:] != (tensor.shape[3], 1):
            return "the scales of tokens do not lie side by side"
    for zero, factor in ((key_zero, key_scale), (value_zero, value_scale)):
        if zero is not None and zero.stride() != factor.stride():
            return "zero points lie otherwise than scales"
    if (
        value_codes.shape[-1] % 2
        or any(stride % 2 for stride in value_codes.stride()[:3])
        or value_codes.data_ptr() % 2
    ):
        return "values of an odd number of channels"
    if max(query.shape[-1], value_codes.shape[-1]) > 256 or value_scale.shape[-1] > 16:
        return f"heads of {max(query.shape[-1], value_codes.shape[-1])} numbers in {value_scale.shape[-1]} groups"
    if step_tokens(_config(query, key_codes, value_scale, format, group, keys), format, group, keys) is None:
        return f"keys in groups of {group} tokens"
    return None


def _outputs(query: Tensor, width: int) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:3], width))
    return out, query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))


@_quantized.register_fake
def _(query: Tensor, key_codes: Tensor, key_scale: Tensor, key_zero: Tensor | None, value_codes: Tensor, *rest: object):
    return _outputs(query, value_codes.shape[-1])


differentiate_by(_quantized, _reference)
