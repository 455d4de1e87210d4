"""Cases of `mla_decode`: absorbed latent attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surgery.kernels.bench.case import Baseline, Case, CaseFields, Inputs, generator, random
from surgery.kernels.mla_decode.operator import mla_decode


@dataclass(frozen=True)
class MLADecode(Case):
    """Decode over a latent of `rank` elements and `rope` rotary ones."""

    rank: int
    rope: int

    operation: ClassVar[str] = "mla_decode"

    @classmethod
    def at(cls, fields: CaseFields) -> Iterator[Case]:
        sizes = ((48, 16),) if fields["model"] == "tiny" else ((512, 64), (256, 64), (128, 64))
        return (cls(**fields, rank=rank, rope=rope) for rank, rope in sizes)

    @property
    def variant(self) -> str:
        return f"{self.rank}+{self.rope}"

    @property
    def cache_bytes(self) -> int:
        return self.batch * self.context * (self.rank + self.rope) * self.dtype.itemsize

    @property
    def query_bytes(self) -> int:
        return self.batch * self.shape.heads * (2 * self.rank + self.rope) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.context * self.shape.heads * (2 * self.rank + self.rope)

    @property
    def scale(self) -> float:
        # The scale of the heads before absorption.
        return (self.shape.head_dim + self.rope) ** -0.5

    def inputs(self, device: torch.device, seed: int) -> Inputs:
        rng = generator(device, seed)
        return {
            "query": random(rng, self.dtype, self.batch, 1, self.shape.heads, self.rank + self.rope),
            "latent": random(rng, self.dtype, self.batch, self.context, self.rank),
            "rope_key": random(rng, self.dtype, self.batch, self.context, self.rope),
            "lengths": self.lengths(device),
        }

    def run(self, inputs: Inputs) -> Tensor:
        return mla_decode(inputs["query"], inputs["latent"], inputs["rope_key"], self.scale, lengths=inputs["lengths"])[
            0
        ]

    def baselines(self) -> dict[str, Baseline]:
        return {"absorbed matmul": self._matmul}

    def _matmul(self, inputs: Inputs) -> Callable[[], Tensor]:
        """Return a call of two batched matmuls with an fp32 softmax in between; it reads the latent twice."""
        key = torch.cat((inputs["latent"], inputs["rope_key"]), dim=-1)
        query, value = inputs["query"][:, 0], inputs["latent"]

        def call() -> Tensor:
            logits = torch.bmm(query, key.transpose(1, 2)).float() * self.scale
            return torch.bmm(logits.softmax(-1).to(query.dtype), value)[:, None]

        return call
