"""Cases of `gqa_decode`: the source's attention, to separate the gain of a method from that of the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surgery.kernels.bench import libraries
from surgery.kernels.bench.case import Baseline, Case, DecodeCase, Inputs, Place, generator, random
from surgery.kernels.gqa_decode.operator import gqa_decode


@dataclass(frozen=True)
class GQADecode(DecodeCase):
    """Decode over grouped keys and values."""

    operation: ClassVar[str] = "gqa_decode"

    @classmethod
    def at(cls, place: Place) -> Iterator[Case]:
        yield cls(**place)

    @property
    def variant(self) -> str:
        return f"{self.shape.heads}/{self.shape.kv_heads}x{self.shape.head_dim}"

    @property
    def cache_bytes(self) -> int:
        return 2 * self.batch * self.context * self.shape.kv_heads * self.shape.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.context * self.shape.heads * self.shape.head_dim

    def inputs(self, device: torch.device, seed: int) -> Inputs:
        rng, shape = generator(device, seed), self.shape
        cached = (self.batch, shape.kv_heads, self.context, shape.head_dim)
        return {
            "query": random(rng, self.dtype, self.batch, 1, shape.heads, shape.head_dim),
            "key": random(rng, self.dtype, *cached),
            "value": random(rng, self.dtype, *cached),
            "lengths": self.lengths(device),
        }

    def run(self, inputs: Inputs) -> Tensor:
        return gqa_decode(inputs["query"], inputs["key"], inputs["value"], self.scale, lengths=inputs["lengths"])[0]

    def baselines(self) -> dict[str, Baseline]:
        def arguments(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
            return inputs["query"].transpose(1, 2), inputs["key"], inputs["value"]

        flex = {"FlexAttention": lambda inputs: libraries.flex(*arguments(inputs), self.scale)}
        return libraries.all_sdpa(arguments, self.scale) | flex
