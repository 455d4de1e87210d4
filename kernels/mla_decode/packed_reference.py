"""PyTorch reference of MLA decode attention over packed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.lowrank_decode.reference import cos_sin
from surgery.kernels.mla_decode.reference import shared_attention
from surgery.kernels.mla_decode.row_slots import grouped, row_bytes
from surgery.kernels.reference import all_rows, paged_tokens, visible


def packed_latent_attention(
    query: Tensor,
    rows: Tensor,
    step: Tensor,
    mean: Tensor,
    scale: float,
    fields: list[int],
    rank: int,
    within: Tensor | None = None,
    begins: Tensor | None = None,
    exact: Tensor | None = None,
    exact_starts: Tensor | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    pages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `mla_decode_packed` in fp32, or in float64 for float64 queries; arguments as in `packed_operator.py`.

    Returns:
        out [B, T, H, v] in the query's dtype, and lse [B, T, H], fp32 or float64.
    """
    if pages is not None:
        rows = paged_tokens(rows, pages)
    if query.dtype == torch.float64:
        step, mean = step.double(), mean.double()
    batch, capacity = rows.shape[:2]
    values, gain = values_of(rows, step, mean, fields, rank, within, begins, exact, exact_starts)
    latent, rope_key = values[..., :rank], values[..., rank:]
    if query.shape[-1] > values.shape[-1]:
        latent = values_of(rows, step, mean, fields, rank, None, None, exact, exact_starts)[0]
    ends = all_rows(capacity, batch, query.device) if lengths is None else lengths.clamp(max=capacity)
    positions = torch.arange(capacity, device=query.device)
    mask = visible(positions < ends[:, None], ends, starts, query.shape[1])
    return shared_attention(query, latent, rope_key, scale, mask, gain)


def values_of(
    rows: Tensor,
    step: Tensor,
    mean: Tensor,
    fields: list[int],
    rank: int,
    within: Tensor | None = None,
    begins: Tensor | None = None,
    exact: Tensor | None = None,
    exact_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Dequantize rows to [B, S, r + ρ] in the dtype of `step`, shared keys rotated; return fp16 gains [B, S, G] too."""
    wide, (batch, capacity) = step.dtype, rows.shape[:2]
    codes, gain = unpack(rows, fields)
    highest = torch.cat([mean.new_full((count,), 2**bits - 1) for _, count, _, bits in grouped(fields)])
    values = (codes - 0.5 * highest) * step + mean
    positions = torch.arange(capacity, device=rows.device)
    if exact is not None and exact.shape[1]:
        slot = positions - (positions.new_zeros(batch, 1) if exact_starts is None else exact_starts[:, None])
        index = slot.clamp(0, exact.shape[1] - 1).long()[..., None].expand(-1, -1, exact.shape[2])
        is_exact = (slot >= 0) & (slot < exact.shape[1])
        values = torch.where(is_exact[..., None], exact.to(wide).gather(1, index), values)
    if within is not None:
        cos, sin = cos_sin(positions, within.to(wide), begins.to(wide))
        real, imag = values[..., rank::2], values[..., rank + 1 :: 2]
        rope_key = torch.stack([real * cos - imag * sin, real * sin + imag * cos], dim=-1).flatten(-2)
        values = torch.cat((values[..., :rank], rope_key), dim=-1)
    return values, gain


def unpack(rows: Tensor, fields: list[int]) -> tuple[Tensor, Tensor | None]:
    """Unpack int16 rows [B, S, lanes] into codes [B, S, channels] fp32 and gains [B, S, G] fp16 (None without)."""
    packed = rows.contiguous().view(torch.uint8)
    used = row_bytes(fields)
    codes = [
        (packed[..., first : first + count] >> position) & ((1 << bits) - 1)
        for first, count, position, bits in grouped(fields)
    ]
    gain = packed[..., used:].contiguous().view(torch.float16) if packed.shape[-1] > used else None
    return torch.cat(codes, dim=-1).float(), gain
