"""Cases of `lowrank_decode`: keys rebuilt from latents, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surgery.kernels.bench.case import Baseline, Case, CaseFields, Inputs, generator, random
from surgery.kernels.lowrank_decode.operator import lowrank_decode, rotation_tables

THETA = 500_000.0


@dataclass(frozen=True)
class LowRankDecode(Case):
    """Decode over joint latents of keys and values, of `rank` elements for every `served` KV heads."""

    rank: int
    served: int

    operation: ClassVar[str] = "lowrank_decode"
    unbatched: ClassVar[frozenset[str]] = frozenset({"key_up", "within", "begins"})

    @classmethod
    def at(cls, fields: CaseFields) -> Iterator[Case]:
        """Yield latents for one, two and all KV heads, at a quarter of the KV bytes."""
        shape = fields["shape"]
        for served in sorted({1, min(2, shape.kv_heads), shape.kv_heads}):
            yield cls(**fields, rank=served * shape.head_dim // 2, served=served)

    @property
    def blocks(self) -> int:
        return self.shape.kv_heads // self.served

    @property
    def variant(self) -> str:
        return f"{self.blocks}x{self.rank}, {self.served} KV heads each"

    @property
    def cache_bytes(self) -> int:
        return self.batch * self.context * self.blocks * self.rank * self.dtype.itemsize

    @property
    def query_bytes(self) -> int:
        return self.batch * self.shape.heads * (self.shape.head_dim + self.rank) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        heads, head_dim = self.shape.heads, self.shape.head_dim
        rebuilt = self.shape.kv_heads * self.rank * head_dim
        return 2 * self.batch * self.context * (rebuilt + heads * (head_dim + self.rank))

    def inputs(self, device: torch.device, seed: int) -> Inputs:
        rng, shape = generator(device, seed), self.shape
        exponents = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
        within, begins = rotation_tables(THETA**-exponents, self.context)
        return {
            "query": random(rng, self.dtype, self.batch, 1, shape.heads, shape.head_dim),
            "latent": random(rng, self.dtype, self.batch, self.context, self.blocks * self.rank),
            "key_up": random(rng, self.dtype, shape.kv_heads, shape.head_dim, self.rank) * self.rank**-0.5,
            "within": within,
            "begins": begins,
            "lengths": self.lengths(device),
        }

    @property
    def _ranges(self) -> list[tuple[int, int, int, int]]:
        """First latent element and rank of each KV head, for its keys and its values."""
        firsts = [head // self.served * self.rank for head in range(self.shape.kv_heads)]
        return [(first, self.rank, first, self.rank) for first in firsts]

    def run(self, inputs: Inputs) -> Tensor:
        return lowrank_decode(
            inputs["query"],
            inputs["latent"],
            inputs["key_up"],
            self.scale,
            rotation=(inputs["within"], inputs["begins"]),
            ranges=None if self.blocks == 1 else self._ranges,
            lengths=inputs["lengths"],
        )[0]

    def baselines(self) -> dict[str, Baseline]:
        return {"reconstructed": self._reconstructed}

    def _reconstructed(self, inputs: Inputs) -> Callable[[], Tensor]:
        """Return a call that rebuilds and rotates all keys in memory and uses PyTorch matmuls; values stay latents."""
        shape, half = self.shape, self.shape.head_dim // 2
        query, latent, key_up = inputs["query"], inputs["latent"], inputs["key_up"]
        exponents = torch.arange(0, shape.head_dim, 2, device=query.device) / shape.head_dim
        angles = torch.arange(self.context, device=query.device)[:, None] * THETA**-exponents
        cos, sin = (each.to(self.dtype) for each in (angles.cos(), angles.sin()))

        def call() -> Tensor:
            blocks = latent.unflatten(-1, (self.blocks, self.rank)).transpose(1, 2)  # [B, blocks, S, rank]
            per_head = blocks.repeat_interleave(self.served, dim=1)
            key = per_head @ key_up.transpose(1, 2)
            first, second = key[..., :half], key[..., half:]
            key = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
            grouped = query[:, 0].unflatten(1, (shape.kv_heads, -1))
            logits = (grouped @ key.transpose(-1, -2)).float() * self.scale
            return (logits.softmax(-1).to(self.dtype) @ per_head).flatten(1, 2)[:, None]

        return call
