"""Slots of a packed row: lane and bit mask of every two neighboring channels.

A row is a sequence of runs of bytes with the same bit fields, and a kernel reads it as lanes of 16 bits. One field of a
lane is a slot: two neighboring channels, in the low and the high byte. Slots in the order of the channels are cut into
planes of equal width. A table holds the lane and mask of each slot, so that one kernel reads rows of all bit patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

import torch
from torch import Tensor


def grouped(fields: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Return (first byte, number of bytes, lowest bit, bits) of each field."""
    return list(zip(*(fields[column::4] for column in range(4)), strict=True))


def channels_of(fields: Sequence[int]) -> int:
    """Return the number of channels of rows with these fields."""
    return sum(fields[1::4])


def row_bytes(fields: Sequence[int]) -> int:
    """Return the bytes of a row that hold fields; gains follow."""
    return max(first + count for first, count, _, _ in grouped(fields))


def slots(fields: Sequence[int]) -> list[int]:
    """Return lane · 256 + mask of the low byte for every slot; slot s holds channels 2s and 2s + 1."""
    return [
        byte // 2 * 256 + (((1 << bits) - 1) << position)
        for first, count, position, bits in grouped(fields)
        for byte in range(first, first + count, 2)
    ]


@cache
def slot_table(fields: tuple[int, ...], rank: int, chunk: int, device: torch.device) -> Tensor:
    """Return int32 slots [planes, chunk], the latent's planes first, then those of the shared key; -1 for padding.

    Cached, so that the address stays valid in a CUDA graph.
    """
    entries = slots(fields)
    parts = [entries[: rank // 2], entries[rank // 2 :]]
    padded = chain.from_iterable([*part, *[-1] * (-len(part) % chunk)] for part in parts)
    return torch.tensor(list(padded), dtype=torch.int32, device=device).view(-1, chunk)
