"""Cases of `mla_decode_packed`: absorbed latent attention over packed rows in the format of `--bits auto`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from surgery.kernels.bench.case import Case, CaseFields, Inputs, generator
from surgery.kernels.bench.case import random as normal
from surgery.kernels.lowrank_decode.operator import rotation_tables
from surgery.kernels.mla_decode.packed_operator import mla_decode_packed

FIRST_TOKENS = 4
Runs = tuple[tuple[tuple[int, ...], int], ...]
"""Runs of bytes: bits of each field of a byte, and number of bytes with these fields."""
ROWS: dict[str, tuple[tuple[Runs, Runs], ...]] = {
    "tiny": (((((5, 3), 4), ((4, 4), 4)), (((4, 4), 8),)),),
    "smollm2": (
        (
            (((8,), 16), ((5, 3), 32), ((4, 4), 24), ((3, 3, 2), 12), ((2, 2, 2, 2), 8)),
            (((8,), 24), ((5, 3), 40), ((4, 4), 28), ((2, 2, 2, 2), 8)),
        ),
    ),
    "else": (((((4, 4), 256),), (((4, 4), 64),)), ((((4, 4), 256), ((3, 3, 2), 128)), (((4, 4), 128),))),
}
"""Runs of the latent and of the shared key, by shape: at 25% of the KV bytes for SmolLM2, at 7.8% and 12.5% for 8B."""


def fields_of(runs: Runs) -> list[tuple[int, int, int, int]]:
    """Return (first byte, number of bytes, lowest bit, bits) of every field, in the order of the channels."""
    fields, first = [], 0
    for byte, count in runs:
        fields += [(first, count, sum(byte[:index]), bits) for index, bits in enumerate(byte)]
        first += count
    return fields


@dataclass(frozen=True)
class MLADecodePacked(Case):
    """Decode over packed rows with these runs; the first tokens are in full precision."""

    latent: Runs
    rope: Runs

    operation: ClassVar[str] = "mla_decode_packed"
    unbatched: ClassVar[frozenset[str]] = frozenset(("step", "mean", "within", "begins"))

    @classmethod
    def at(cls, fields: CaseFields) -> Iterator[Case]:
        return (cls(**fields, latent=latent, rope=rope) for latent, rope in ROWS.get(fields["model"], ROWS["else"]))

    @property
    def rank(self) -> int:
        """Channels of the latent."""
        return sum(count for _, count, _, _ in fields_of(self.latent))

    @property
    def width(self) -> int:
        """Channels of a row."""
        return self.rank + sum(count for _, count, _, _ in fields_of(self.rope))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return sum(count for _, count in (*self.latent, *self.rope))

    @property
    def variant(self) -> str:
        return f"{self.rank}+{self.width - self.rank} in {self.row_bytes} B"

    @property
    def cache_bytes(self) -> int:
        return self.batch * (self.context * self.row_bytes + FIRST_TOKENS * self.width * self.dtype.itemsize)

    @property
    def query_bytes(self) -> int:
        return self.batch * self.shape.heads * (self.rank + self.width) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.context * self.shape.heads * (self.rank + self.width)

    def inputs(self, device: torch.device, seed: int) -> Inputs:
        rng, shape = generator(device, seed), (self.batch, self.context, self.row_bytes // 2)
        bits = torch.tensor(
            [bits for _, count, _, bits in fields_of((*self.latent, *self.rope)) for _ in range(count)], device=device
        )
        within, begins = rotation_tables(
            10_000.0 ** -torch.linspace(0, 1, (self.width - self.rank) // 2, device=device), self.context
        )
        return {
            "query": normal(rng, self.dtype, self.batch, 1, self.shape.heads, self.width),
            "rows": torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device, generator=rng),
            "step": 12.0**0.5 / 2.0**bits,  # values of variance 1
            "mean": normal(rng, torch.float32, self.width),
            "within": within,
            "begins": begins,
            "exact": normal(rng, self.dtype, self.batch, FIRST_TOKENS, self.width),
            "lengths": self.lengths(device),
        }

    def run(self, inputs: Inputs) -> Tensor:
        fields = tuple(chain.from_iterable(fields_of((*self.latent, *self.rope))))
        names = ("query", "rows", "step", "mean")
        return mla_decode_packed(
            *(inputs[name] for name in names),
            self.scale,
            fields=fields,
            rank=self.rank,
            rotation=(inputs["within"], inputs["begins"]),
            exact=inputs["exact"],
            lengths=inputs["lengths"],
        )[0]
