"""Cases of `sdpa`: decode steps of the source by PyTorch's attention, the baseline of all other operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from surgery.kernels.bench.case import Baseline, Case, CaseFields, Inputs, generator, random

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "Flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


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
        return {
            f"SDPA {name}": lambda inputs, name=name: sdpa(*_arguments(inputs), self.scale, name) for name in BACKENDS
        }


def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, backend: str) -> Callable[[], Tensor]:
    """Return a call of PyTorch's SDPA with a single backend; query [B, H, T, d], key and value [B, G, S, d]."""
    if backend == "efficient":  # no GQA support, so expand the KV heads
        repeat = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeat, 1) for part in (key, value))

    def call() -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            grouped = query.shape[1] != key.shape[1]
            return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=grouped).transpose(1, 2)

    return call


def _arguments(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return inputs["query"].transpose(1, 2), inputs["key"], inputs["value"]
