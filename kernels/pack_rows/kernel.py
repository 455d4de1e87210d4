"""Kernel that clamps, rounds and packs the values of new tokens: one program per token and block of bytes.

A table holds the channels of each byte's fields, so that one compiled kernel serves all row formats.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.launch import Config, Launch, launches_of, strides
from surgery.kernels.mla_decode.row_slots import grouped, row_bytes
from surgery.kernels.pack_rows.reference import packed_rows

BLOCK = 128
ROUNDING = tl.constexpr(12582912.0)
"""1.5 · 2^23: added and subtracted, it rounds fp32 values below 2^22 to the nearest integer, ties to even."""


@launches_of(packed_rows)
def launches(args: SimpleNamespace, *, out: Tensor) -> list[Launch]:
    """Return the launch that fills `out` uint8 [B, T, bytes], contiguous."""
    batch, tokens, _ = args.values.shape
    width, table = out.shape[-1], field_table(tuple(args.fields), out.device)
    launch = Launch.of(
        pack_rows_kernel,
        (batch * tokens, triton.cdiv(width, BLOCK)),
        Config(warps=4, stages=1),
        vars(args),
        out=out,
        table=table,
        width=width,
        tokens=tokens,
        **strides("row", "token", values=args.values),
        SLOTS=table.shape[0],
        BLOCK=BLOCK,
    )
    return [launch]


@cache
def field_table(fields: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int32 [fields, bytes]: channel · 64 + lowest bit · 8 + bits - 1 of each byte's fields, -1 for padding.

    Cached, so that the address stays valid in a CUDA graph.
    """
    entries: list[list[int]] = [[] for _ in range(row_bytes(fields))]
    channel = 0
    for first, count, position, bits in grouped(fields):
        for offset in range(count):
            entries[first + offset].append((channel + offset) * 64 + position * 8 + bits - 1)
        channel += count
    length = max(map(len, entries))
    padded = [each + [-1] * (length - len(each)) for each in entries]
    return torch.tensor(padded, dtype=torch.int32, device=device).T.contiguous()


@triton.jit(do_not_specialize=["tokens", "values_row"])
def pack_rows_kernel(
    values, step, mean, table, out, width, tokens, values_row, values_token, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Pack BLOCK bytes of one token's row."""
    index = tl.program_id(0)
    values_at = values + (index // tokens).to(tl.int64) * values_row + (index % tokens) * values_token
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    packed = tl.zeros((BLOCK,), tl.int32)
    for slot in tl.static_range(SLOTS):
        entry = tl.load(table + slot * width + byte, mask=byte < width, other=-1)
        mask, channel = entry >= 0, entry // 64
        highest = ((2 << (entry % 8)) - 1).to(tl.float32)
        value = tl.load(values_at + channel, mask=mask, other=0.0).to(tl.float32)
        value -= tl.load(mean + channel, mask=mask, other=0.0)
        level = tl.div_rn(value, tl.load(step + channel, mask=mask, other=1.0)) + 0.5 * highest
        level = tl.minimum(tl.maximum(level, 0.0), highest) + ROUNDING - ROUNDING
        packed |= tl.where(mask, level.to(tl.int32) << (entry // 8 % 8), 0)
    tl.store(out + index.to(tl.int64) * width + byte, packed.to(tl.uint8), mask=byte < width)
