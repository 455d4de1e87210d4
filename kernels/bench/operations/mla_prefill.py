"""Cases of `mla_prefill`: prompts with keys and values of different or equal widths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surgery.kernels.bench import libraries
from surgery.kernels.bench.case import MOST_PREFILL, Baseline, Case, Inputs, Place, PrefillCase, generator, random
from surgery.kernels.mla_prefill.operator import mla_prefill


@dataclass(frozen=True)
class MLAPrefill(PrefillCase):
    """Causal attention over a whole prompt with one KV head per query head, keys of `key_dim` elements."""

    key_dim: int
    value_dim: int

    operation: ClassVar[str] = "mla_prefill"

    @classmethod
    def at(cls, place: Place) -> Iterator[Case]:
        if place["batch"] * place["context"] <= MOST_PREFILL:
            width = place["shape"].head_dim
            yield cls(**place, key_dim=width + width // 2, value_dim=width)
            yield cls(**place, key_dim=width, value_dim=width)

    @property
    def variant(self) -> str:
        return f"{self.key_dim}/{self.value_dim}"

    @property
    def cache_bytes(self) -> int:
        return self.batch * self.context * self.shape.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def query_bytes(self) -> int:
        return self.cache_bytes

    @property
    def flops(self) -> int:
        pairs = self.context * (self.context + 1) // 2
        return 2 * self.batch * self.shape.heads * pairs * (self.key_dim + self.value_dim)

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5

    def inputs(self, device: torch.device, seed: int) -> Inputs:
        rng, tokens = generator(device, seed), (self.batch, self.shape.heads, self.context)
        return {
            "query": random(rng, self.dtype, *tokens, self.key_dim),
            "key": random(rng, self.dtype, *tokens, self.key_dim),
            "value": random(rng, self.dtype, *tokens, self.value_dim),
        }

    def run(self, inputs: Inputs) -> Tensor:
        return mla_prefill(inputs["query"], inputs["key"], inputs["value"], self.scale)[0]

    def baselines(self) -> dict[str, Baseline]:
        return libraries.all_sdpa(
            lambda inputs: (inputs["query"], inputs["key"], inputs["value"]), self.scale, causal=True
        )
