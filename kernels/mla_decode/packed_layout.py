"""Planes of a packed row: what one mask takes out of a tile of lanes.

A row is a sequence of runs of bytes with the same bit fields, and a kernel sees it as lanes of 16 bits, cut into tiles
of equal width. The fields of one position and width in all lanes of a tile are a plane: two channels a lane, of the low
and the high byte. A tile that two runs share has the planes of both; lanes of the other run give bits that nobody
reads. So runs may begin anywhere, and only the planes, not the lengths of runs, are constants of compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

Plane = tuple[int, int, int]
"""Tile, lowest bit and bits of the fields of a plane."""


@dataclass(frozen=True)
class Section:
    """Neighbouring fields of a row: those of the latent, or of the shared key.

    Attributes:
        lane, lanes: where they begin in a row, and how many lanes they have.
        fields: first byte, bytes, lowest bit, bits and first channel of each.
    """

    lane: int
    lanes: int
    fields: tuple[tuple[int, int, int, int, int], ...]

    def planes(self, chunk: int) -> dict[Plane, list[int]]:
        """Planes of tiles of `chunk` lanes, with the channel of the low byte of each lane, -1 where there is none."""
        planes: dict[Plane, list[int]] = {}
        for first, count, position, bits, channel in self.fields:
            for byte in range(first, first + count, 2):
                tile, lane = divmod(byte // 2 - self.lane, chunk)
                plane = planes.setdefault((tile, position, bits), [-1] * chunk)
                plane[lane] = channel + byte - first
        return dict(sorted(planes.items()))


@cache
def sections(fields: tuple[int, ...], rank: int) -> tuple[Section, Section]:
    """Split the fields of a row, as `mla_decode_packed` takes them, into those of the latent and of the shared key."""
    parts: tuple[list, list] = ([], [])
    channel = 0
    for first, count, position, bits in grouped(fields):
        parts[channel >= rank].append((first, count, position, bits, channel))
        channel += count
    made, lane = [], 0
    for part in parts:
        end = max((first + count for first, count, *_ in part), default=2 * lane) // 2
        made.append(Section(lane, end - lane, tuple(part)))
        lane = end
    return made[0], made[1]


def grouped(fields: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """First byte, bytes, lowest bit and bits of each field."""
    return list(zip(*(fields[place::4] for place in range(4)), strict=True))


def row_bytes(fields: Sequence[int]) -> int:
    """Bytes of a row that fields lie in; those after them are gains."""
    return max(first + count for first, count, _, _ in grouped(fields))


@cache
def channel_table(fields: tuple[int, ...], rank: int, chunk: int, device: torch.device) -> Tensor:
    """Channels [planes, chunk] int32 of the latent's planes and then of the shared key's.

    Copied to the device once: a CUDA graph must find it there.
    """
    planes = [channels for section in sections(fields, rank) for channels in section.planes(chunk).values()]
    return torch.tensor(planes, dtype=torch.int32, device=device)
