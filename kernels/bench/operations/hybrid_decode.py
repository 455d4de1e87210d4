"""Cases of `hybrid_decode`: half of the KV heads are full, the others keep sinks and a window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surgery.kernels.bench import libraries
from surgery.kernels.bench.case import Baseline, Case, CaseFields, Inputs, generator, random
from surgery.kernels.hybrid_decode.operator import hybrid_decode


@dataclass(frozen=True)
class HybridDecode(Case):
    """Decode over `full` full KV heads and streaming ones with sinks and a window."""

    full: int
    sinks: int
    recent: int

    operation: ClassVar[str] = "hybrid_decode"

    @classmethod
    def at(cls, fields: CaseFields) -> Iterator[Case]:
        sinks, recent = (4, 12) if fields["model"] == "tiny" else (64, 256)
        if fields["context"] > sinks + recent:
            yield cls(**fields, full=fields["shape"].kv_heads // 2, sinks=sinks, recent=recent)

    @property
    def slots(self) -> int:
        return self.sinks + self.recent

    @property
    def variant(self) -> str:
        return f"{self.full} of {self.shape.kv_heads} full, {self.sinks}+{self.recent}"

    @property
    def _entries(self) -> int:
        return self.full * self.context + (self.shape.kv_heads - self.full) * self.slots

    @property
    def cache_bytes(self) -> int:
        return 2 * self.batch * self._entries * self.shape.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        each = self.shape.heads // self.shape.kv_heads
        return 4 * self.batch * each * self._entries * self.shape.head_dim

    def inputs(self, device: torch.device, seed: int) -> Inputs:
        rng, shape = generator(device, seed), self.shape
        full = (self.batch, self.full, self.context, shape.head_dim)
        streaming = (self.batch, shape.kv_heads - self.full, self.slots, shape.head_dim)
        return {
            "query": random(rng, self.dtype, self.batch, 1, shape.heads, shape.head_dim),
            "full_key": random(rng, self.dtype, *full),
            "full_value": random(rng, self.dtype, *full),
            "streaming_key": random(rng, self.dtype, *streaming),
            "streaming_value": random(rng, self.dtype, *streaming),
            "lengths": self.lengths(device),
        }

    def run(self, inputs: Inputs) -> Tensor:
        cached = (inputs[name] for name in ("full_key", "full_value", "streaming_key", "streaming_value"))
        settings = {"sink_slots": self.sinks, "sinks": self.sinks, "recent": self.recent}
        return hybrid_decode(inputs["query"], *cached, self.scale, **settings, lengths=inputs["lengths"])[0]

    def baselines(self) -> dict[str, Baseline]:
        return {"two SDPA": self._two_calls}

    def _two_calls(self, inputs: Inputs) -> Callable[[], Tensor]:
        """Return a call that runs Flash on full and streaming heads separately and concatenates."""
        rows = self.full * (self.shape.heads // self.shape.kv_heads)
        query = inputs["query"].transpose(1, 2)
        calls = [
            libraries.sdpa(part, inputs[f"{kind}_key"], inputs[f"{kind}_value"], self.scale, "Flash")
            for part, kind in ((query[:, :rows], "full"), (query[:, rows:], "streaming"))
        ]
        return lambda: torch.cat([call() for call in calls], dim=2)
