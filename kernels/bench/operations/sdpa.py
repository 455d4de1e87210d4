"""Cases of `sdpa`: decode steps of the source by PyTorch's attention, the baseline of all other operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from surgery.kernels.bench import libraries
from surgery.kernels.bench.case import Baseline, Case, CaseFields, Inputs, generator, random


@dataclass(frozen=True)
class SDPA(Case):
    """Decode over grouped keys and values by the backend that PyTorch chooses; the baselines are single backends."""

    operation: ClassVar[str] = "sdpa"

    @classmethod
    def at(cls, fields: CaseFields) -> Iterator[Case]:
        yield cls(**fields)

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
        }

    def run(self, inputs: Inputs) -> Tensor:
        return scaled_dot_product_attention(*_arguments(inputs), scale=self.scale, enable_gqa=True).transpose(1, 2)

    def baselines(self) -> dict[str, Baseline]:
        flex = {"FlexAttention": lambda inputs: libraries.flex(*_arguments(inputs), self.scale)}
        return libraries.all_sdpa(_arguments, self.scale) | flex


def _arguments(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return inputs["query"].transpose(1, 2), inputs["key"], inputs["value"]
