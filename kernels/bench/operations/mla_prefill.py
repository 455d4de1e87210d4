"""Cases of `mla_prefill`: prompts with keys and values of other widths than each other's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surgery.kernels.bench import libraries
from surgery.kernels.bench.case import MOST_PREFILL, Baseline, Case, Inputs, Place, generator, quietly, random
from surgery.kernels.mla_prefill.operator import mla_prefill

PIECE = 128
"""Queries whose exact result is computed, at either end: their logits over all keys fit into memory."""


@dataclass(frozen=True)
class MLAPrefill(Case):
    """Causal attention of a whole prompt; every head has its own keys of `key_dim` numbers."""

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

    def exact(self, inputs: Inputs) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
        """The first and the last queries of the first and the last head."""
        piece = min(PIECE, self.context)
        for head in sorted({0, self.shape.heads - 1}):
            one = {name: tensor[:1, head : head + 1] for name, tensor in inputs.items()}
            first = {name: tensor[:, :, :piece].double() for name, tensor in one.items()}
            last = {name: tensor.double() for name, tensor in one.items()}
            last["query"] = last["query"][:, :, -piece:]
            with quietly():
                yield lambda out, h=head: out[:1, :piece, h : h + 1], self.run(first)
                yield lambda out, h=head: out[:1, -piece:, h : h + 1], self.run(last)

    def baselines(self) -> dict[str, Baseline]:
        return {
            f"SDPA {name}": lambda inputs, name=name: libraries.sdpa(
                inputs["query"], inputs["key"], inputs["value"], self.scale, name, causal=True
            )
            for name in libraries.SDPA
        }
