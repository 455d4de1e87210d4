"""Slots of a packed row: where the two channels of each lane lie, for every field.

A row is a sequence of runs of bytes with the same bit fields, and a kernel sees it as lanes of 16 bits. One field of a
lane is a slot: two neighboring channels, in the low and the high byte. Slots in the order of the channels are cut into
planes of equal width. Where a slot lies is a table, so that rows of all patterns are read by one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

import torch
from torch import Tensor


def grouped(fields: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """First byte, bytes, lowest bit and bits of each field."""
    return list(zip(*(fields[place::4] for place in range(4)), strict=True))


def row_bytes(fields: Sequence[int]) -> int:
    """Bytes of a row that fields lie in; those after them are gains."""
    return max(first + count for first, count, _, _ in grouped(fields))


def slots(fields: Sequence[int]) -> list[int]:
    """Return lane · 256 + mask of the low byte of every slot: that of channels 2s and 2s + 1 at place s."""
    return [
        byte // 2 * 256 + (((1 << bits) - 1) << position)
        for first, count, position, bits in grouped(fields)
        for byte in range(first, first + count, 2)
    ]


@cache
def slot_table(fields: tuple[int, ...], rank: int, chunk: int, device: torch.device) -> Tensor:
    """Slots [planes, chunk] int32 of the latent's planes and then of the shared key's, -1 where there is none.

    Copied to the device once: a CUDA graph must find it there.
    """
    entries = slots(fields)
    parts = [entries[: rank // 2], entries[rank // 2 :]]
    padded = chain.from_iterable([*part, *[-1] * (-len(part) % chunk)] for part in parts)
    return torch.tensor(list(padded), dtype=torch.int32, device=device).view(-1, chunk)
