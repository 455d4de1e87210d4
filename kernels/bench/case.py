"""Base classes of benchmark cases: an operation at a shape, with inputs, bytes, FLOPs, references and baselines.

Shapes: B rows, T new tokens of each, S tokens of the cache, H query heads, G KV heads, d head size.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
CaseFields = dict[str, Any]
"""Fields common to all cases, by name."""
Baseline = Callable[[Inputs], Callable[[], Tensor]]
"""Function from a case's inputs to a call that computes the same output; preparation of layouts is not timed."""


@dataclass(frozen=True)
class Model:
    """Attention shape of a model."""

    heads: int
    kv_heads: int
    head_dim: int


MODELS = {
    "llama2-7b": Model(32, 32, 128),
    "llama3-8b": Model(32, 8, 128),
    "qwen2.5-7b": Model(28, 4, 128),
    "smollm2": Model(9, 3, 64),
    "tiny": Model(4, 2, 32),
}
"""Shapes by name; tiny is for machines without a GPU, where only correctness is checked."""


@dataclass(frozen=True)
class Case(ABC):
    """Abstract benchmark case: one operation at one shape of `MODELS`, with one new token per row.

    All inputs except `unbatched` have the batch B as first dimension; the context is S.
    """

    model: str
    batch: int
    context: int
    dtype: torch.dtype
    shape: Model

    operation: ClassVar[str]
    unbatched: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    @abstractmethod
    def at(cls, fields: CaseFields) -> Iterator[Case]:
        """Yield all cases of the operation for the common fields `fields`."""

    @property
    @abstractmethod
    def variant(self) -> str:
        """Name of the case among those of the operation, such as 512+64."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Bytes of the cached tokens, each counted once: the minimum that a kernel reads."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """FLOPs of the operation's matrix products."""

    @property
    def bytes(self) -> int:
        """Minimum memory traffic in bytes: cache, queries and outputs."""
        return self.cache_bytes + self.query_bytes

    @property
    def query_bytes(self) -> int:
        """Bytes of queries and outputs of whole heads."""
        return 2 * self.batch * self.shape.heads * self.shape.head_dim * self.dtype.itemsize

    @property
    def scale(self) -> float:
        """Scale of the logits."""
        return self.shape.head_dim**-0.5

    @abstractmethod
    def inputs(self, device: torch.device, seed: int) -> Inputs:
        """Return random inputs of one call, by name."""

    @abstractmethod
    def run(self, inputs: Inputs) -> Tensor:
        """Compute the output with this package's operator."""

    def exact(self, inputs: Inputs) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
        """Yield the first and the last row; rows are independent."""
        for row in sorted({0, self.batch - 1}):
            with quietly():
                yield lambda out, row=row: out[row : row + 1], self.run(self._double(inputs, row))

    def baselines(self) -> dict[str, Baseline]:
        """Return other implementations of the operation, by name."""
        return {}

    def lengths(self, device: torch.device) -> Tensor:
        return torch.full((self.batch,), self.context, dtype=torch.int32, device=device)

    def _double(self, inputs: Inputs, row: int) -> Inputs:
        rows = {name: tensor if name in self.unbatched else tensor[row : row + 1] for name, tensor in inputs.items()}
        return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in rows.items()}


def random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return standard normal values on the generator's device."""
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress the warning that float64 inputs run on the PyTorch reference, which is intended here."""
    logger = logging.getLogger("surgery.kernels")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
