"""PyTorch reference of `pack_rows`, which the kernel matches bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.mla_decode.row_slots import grouped, row_bytes


def packed_rows(values: Tensor, step: Tensor, mean: Tensor, fields: list[int]) -> Tensor:
    """Quantize and pack values [B, T, channels] into uint8 rows [B, T, bytes]; arguments as in `pack_rows`."""
    rows = torch.zeros(*values.shape[:2], row_bytes(fields), dtype=torch.uint8, device=values.device)
    channel = 0
    for first, count, position, bits in grouped(fields):
        run, highest = slice(channel, channel + count), 2.0**bits - 1
        levels = (values[..., run].float() - mean[run]) / step[run] + 0.5 * highest
        rows[..., first : first + count] |= levels.round().clamp(0, highest).to(torch.uint8) << position
        channel += count
    return rows
