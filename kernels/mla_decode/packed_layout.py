"""Planes of a packed row: what one mask takes out of a tile of lanes.

A row is a sequence of runs of bytes with the same bit fields, and a kernel sees it as lanes of 16 bits, cut into tiles
of equal width. The k-th fields of all bytes in a tile are a plane: two channels a lane, of the low and the high byte.
A plane has one mask where its tile lies in one run, else a mask for each lane. So runs may begin anywhere, and only the
planes, not the lengths of runs, are constants of compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

Plane = tuple[int, int]
"""Tile of a plane and the mask of its fields, 0 where lanes differ."""


@dataclass(frozen=True)
class Section:
    """Neighboring fields of a row: those of the latent, or of the shared key.

    Attributes:
        lane, lanes: where they begin in a row, and how many lanes they have.
        fields: first byte, bytes, lowest bit, bits and first channel of each.
    """

    lane: int
    lanes: int
    fields: tuple[tuple[int, int, int, int, int], ...]

    def entries(self, chunk: int) -> list[tuple[int, list[int]]]:
        """Tile of each plane, and channel · 256 + mask of the low byte of each of `chunk` lanes, -1 for none."""
        planes: dict[tuple[int, int], list[int]] = {}
        number: dict[int, int] = {}
        for first, count, position, bits, channel in self.fields:
            index = number[first] = number.get(first, -1) + 1
            for byte in range(first, first + count, 2):
                tile, lane = divmod(byte // 2 - self.lane, chunk)
                plane = planes.setdefault((tile, index), [-1] * chunk)
                plane[lane] = (channel + byte - first) * 256 + (((1 << bits) - 1) << position)
        return [(tile, planes[tile, index]) for tile, index in sorted(planes)]

    def planes(self, chunk: int) -> tuple[Plane, ...]:
        """Planes of tiles of `chunk` lanes."""
        masks = [(tile, {entry % 256 for entry in lanes if entry >= 0}) for tile, lanes in self.entries(chunk)]
        return tuple((tile, next(iter(each)) if len(each) == 1 else 0) for tile, each in masks)


@cache
def sections(fields: tuple[int, ...], rank: int) -> tuple[Section, Section]:
    """Split the fields of a row, as `mla_decode_packed` takes them, into those of the latent and of the shared key."""
    parts: tuple[list, list] = ([], [])
    channel = 0
    for first, count, position, bits in grouped(fields):
        parts[channel >= rank].append((first, count, position, bits, channel))
        channel += count
    result, lane = [], 0
    for part in parts:
        end = max((first + count for first, count, *_ in part), default=2 * lane) // 2
        result.append(Section(lane, end - lane, tuple(part)))
        lane = end
    return result[0], result[1]


def grouped(fields: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """First byte, bytes, lowest bit and bits of each field."""
    return list(zip(*(fields[place::4] for place in range(4)), strict=True))


def row_bytes(fields: Sequence[int]) -> int:
    """Bytes of a row that fields lie in; those after them are gains."""
    return max(first + count for first, count, _, _ in grouped(fields))


@cache
def channel_table(fields: tuple[int, ...], rank: int, chunk: int, device: torch.device) -> Tensor:
    """Entries [planes, chunk] int32 of the latent's planes and then of the shared key's.

    Copied to the device once: a CUDA graph must find it there.
    """
    planes = [lanes for section in sections(fields, rank) for _, lanes in section.entries(chunk)]
    return torch.tensor(planes, dtype=torch.int32, device=device)
