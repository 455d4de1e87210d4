"""Cases of `sink_recent_prefill`: prompts in which half of the KV heads see only sinks and a window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surgery.kernels.bench import libraries
from surgery.kernels.bench.case import Baseline, Case, Inputs, Place, generator, quietly, random
from surgery.kernels.sink_recent_prefill.operator import sink_recent_prefill

MOST_PREFILL = 32_768
"""Maximum tokens of a case; longer prompts take seconds per call."""
PIECE = 128
"""Queries at either end of a prompt that are checked in float64; their logits over all keys fit into memory."""


@dataclass(frozen=True)
class SinkRecentPrefill(Case):
    """Prefill with `full` full KV heads; the others see sinks and a window."""

    full: int
    sinks: int
    recent: int

    operation: ClassVar[str] = "sink_recent_prefill"

    @classmethod
    def at(cls, place: Place) -> Iterator[Case]:
        if place["batch"] * place["context"] <= MOST_PREFILL:
            sinks, recent = (4, 12) if place["model"] == "tiny" else (64, 256)
            yield cls(**place, full=place["shape"].kv_heads // 2, sinks=sinks, recent=recent)

    @property
    def variant(self) -> str:
        return f"{self.full} of {self.shape.kv_heads} full, {self.sinks}+{self.recent}"

    @property
    def cache_bytes(self) -> int:
        return 2 * self.batch * self.context * self.shape.kv_heads * self.shape.head_dim * self.dtype.itemsize

    @property
    def query_bytes(self) -> int:
        return 2 * self.batch * self.context * self.shape.heads * self.shape.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """FLOPs of the visible query-key pairs."""
        window = min(self.context, self.sinks + self.recent)
        dense = self.context * (self.context + 1) // 2
        streaming = window * (window + 1) // 2 + (self.context - window) * window
        each = self.shape.heads // self.shape.kv_heads
        pairs = each * (self.full * dense + (self.shape.kv_heads - self.full) * streaming)
        return 4 * self.batch * pairs * self.shape.head_dim

    def inputs(self, device: torch.device, seed: int) -> Inputs:
        rng, shape = generator(device, seed), self.shape
        cached = (self.batch, shape.kv_heads, self.context, shape.head_dim)
        streaming = shape.kv_heads - self.full
        numbers = {"dtype": torch.int32, "device": device}
        return {
            "query": random(rng, self.dtype, self.batch, shape.heads, self.context, shape.head_dim),
            "key": random(rng, self.dtype, *cached),
            "value": random(rng, self.dtype, *cached),
            "sinks": torch.tensor([0] * self.full + [self.sinks] * streaming, **numbers),
            "recent": torch.tensor([-1] * self.full + [self.recent] * streaming, **numbers),
        }

    def run(self, inputs: Inputs) -> Tensor:
        names = ("sinks", "recent")
        tensors = (inputs[name] for name in ("query", "key", "value"))
        return sink_recent_prefill(*tensors, self.scale, *(inputs[name] for name in names))[0]

    def exact(self, inputs: Inputs) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
        """Yield the first and last queries of the first query head of the first and the last KV head."""
        piece, groups = min(PIECE, self.context), inputs["key"].shape[1]
        each = inputs["query"].shape[1] // groups
        for group in sorted({0, groups - 1}):
            head = group * each
            one = {name: tensor[group : group + 1] for name, tensor in inputs.items() if tensor.dim() == 1}
            last = {name: inputs[name][:1, group : group + 1].double() for name in ("key", "value")}
            last["query"] = inputs["query"][:1, head : head + 1].double()
            first = {name: tensor[:, :, :piece] for name, tensor in last.items()}
            last["query"] = last["query"][:, :, -piece:]
            with quietly():
                yield lambda out, h=head: out[:1, :piece, h : h + 1], self.run(one | first)
                yield lambda out, h=head: out[:1, -piece:, h : h + 1], self.run(one | last)

    def baselines(self) -> dict[str, Baseline]:
        return {"FlexAttention": self._flex}

    def _flex(self, inputs: Inputs) -> Callable[[], Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask

        each = self.shape.heads // self.shape.kv_heads
        sinks, recent = inputs["sinks"], inputs["recent"]

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            group = head // each
            near = (recent[group] < 0) | (query - key < recent[group]) | (key < sinks[group])
            return (key <= query) & near

        length, device = self.context, inputs["query"].device
        mask = create_block_mask(visible, None, self.shape.heads, length, length, device=device, _compile=True)
        return libraries.flex(inputs["query"], inputs["key"], inputs["value"], self.scale, mask)
