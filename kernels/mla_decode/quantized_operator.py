"""`mla_decode_quantized`: absorbed latent attention over a quantized cache, as an operator of PyTorch."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from surgery.kernels.checks import check_counts, check_positive
from surgery.kernels.mla_decode.operator import check_gain, unsupported
from surgery.kernels.mla_decode.quantized_reference import quantized_latent_attention
from surgery.kernels.operation import Operation, attention_outputs
from surgery.kernels.quantization import BITS


def mla_decode_quantized(
    query: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    rope_codes: Tensor,
    rope_scales: Tensor,
    rope_zeros: Tensor | None,
    scale: float,
    *,
    format: str,
    group: int,
    by_channel: bool,
    lengths: Tensor | None = None,
    coded: Tensor | None = None,
    starts: Tensor | None = None,
    key_gain: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The share that quantized tokens have in the attention of the last T tokens of each row.

    Quantized are the oldest tokens of a row; what is exact stands behind them. Attention over the whole row is the
    merge (`split_kv.merge`) of this result with `mla_decode`'s over the exact tokens.

    Args:
        query: [B, T, H, r + ρ], the latent part first, the last ρ rotated.
        codes: [B, S · bits / 8, r] uint8 of the latents; consecutive tokens share a byte, the first in its lowest bits.
        scales, zeros: of the latents: by channel [B, S / group, r], by token [B, S, groups of r]. fp8 has no zeros.
        rope_codes, rope_scales, rope_zeros: of the rotated keys, always by token: [B, S · bits / 8, ρ] and
            [B, S, groups of ρ].
        scale: multiplies the logits.
        format: int8, int4, int2 or fp8 (e4m3).
        group: tokens of a channel, or at most so many channels of a token, that share a scale.
        by_channel: whether the latents' scales are those of channels.
        lengths: int32 [B], all tokens of each row, exact and new ones included; None where all are quantized.
        coded: int32 [B], how many tokens of each row are quantized; None for all S.
        starts: int32 [B], the first token that is no padding; None for 0.
        key_gain: [B, S, G] factor on the logits of the H / G heads of each group.
        window: how many latest tokens a query sees, itself included; None for all.

    Returns:
        out [B, T, H, r] in the query's dtype and lse [B, T, H] fp32, as of `mla_decode`.

    Raises:
        ValueError: shapes, dtypes or settings that do not belong together.
    """
    tensors = (query, codes, scales, zeros, rope_codes, rope_scales, rope_zeros)
    settings = (format, group, by_channel)
    return _mla_decode_quantized(*tensors, scale, *settings, lengths, coded, starts, key_gain, window)


def _check(call: SimpleNamespace) -> None:
    query, codes, rope_codes, format, group = call.query, call.codes, call.rope_codes, call.format, call.group
    name = "mla_decode_quantized"
    if format not in BITS:
        raise ValueError(f"{name}: format {format!r}: {', '.join(BITS)} are possible")
    per_byte = 8 // BITS[format]
    if group < 1 or group % per_byte:
        raise ValueError(f"{name}: a group of {group}: a positive multiple of {per_byte} is needed for {format}")
    if codes.dtype != torch.uint8 or rope_codes.dtype != torch.uint8 or codes.shape[:2] != rope_codes.shape[:2]:
        raise ValueError(
            f"{name}: codes {list(codes.shape)} and rope_codes {list(rope_codes.shape)}: uint8 of the same tokens"
        )
    width = codes.shape[-1] + rope_codes.shape[-1]
    if query.dim() != 4 or query.shape[0] != codes.shape[0] or query.shape[-1] != width:
        raise ValueError(f"{name}: query {list(query.shape)}: [{codes.shape[0]}, T, H, {width}] is needed")
    batch, num_tokens = codes.shape[0], codes.shape[1] * per_byte
    for what, scale_, zero, columns, channel in (
        ("scales", call.scales, call.zeros, codes.shape[-1], call.by_channel),
        ("rope_scales", call.rope_scales, call.rope_zeros, rope_codes.shape[-1], False),
    ):
        shape = (batch, num_tokens // group, columns) if channel else (batch, num_tokens, -(-columns // group))
        if tuple(scale_.shape) != shape or (channel and num_tokens % group):
            raise ValueError(
                f"{name}: {what} {list(scale_.shape)} of {num_tokens} tokens of {columns}: {list(shape)} is needed"
            )
        if (zero is None) != (format == "fp8") or (zero is not None and zero.shape != scale_.shape):
            raise ValueError(f"{name}: zeros of the shape of {what} belong to integers, none to fp8")
    check_gain(name, query, call.key_gain, (batch, num_tokens))
    check_counts(name, batch, lengths=call.lengths, coded=call.coded, starts=call.starts)
    check_positive(name, window=call.window)


def _unsupported(call: SimpleNamespace) -> str | None:
    from surgery.kernels.mla_decode import quantized_kernel

    reason = unsupported(call)
    if reason or call.query.device.type != "cuda":
        return reason
    return quantized_kernel.unsupported(call.codes.shape[-1], call.group, call.by_channel, call.query.dtype)


_mla_decode_quantized = Operation(
    "mla_decode_quantized",
    quantized_latent_attention,
    lambda call: attention_outputs(call.query, call.codes.shape[-1]),
    _unsupported,
    _check,
    growth=(dict.fromkeys(("codes", "rope_codes", "scales", "zeros", "rope_scales", "rope_zeros", "key_gain"), 1),),
    kernel="surgery.kernels.mla_decode.quantized_kernel",
)
