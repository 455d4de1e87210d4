"""Converted model, independent of the class that will carry it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MLASpec:
    """Shapes of an MLA conversion; ranks and frequencies per layer. Rank 0 is a layer that keeps its attention."""

    heads: int
    head_dim: int
    value_dim: int
    hidden: int
    ranks: tuple[int, ...]
    inv_freq: tuple[Tensor, ...]  # per layer [ρ/2], float64
    dtype: torch.dtype  # of the rewritten tensors
    query_bias: bool
    latent_bias: bool  # the source has a key or value bias
    output_bias: bool
    key_norm_eps: float | None  # the source normalizes queries and keys per head
    windows: tuple[int | None, ...]
    input_lengths: tuple[float, ...]  # per layer: what inputs of its attention have, the norm's weight as a vector

    @property
    def layers(self) -> int:
        return len(self.ranks)

    @property
    def kept(self) -> frozenset[int]:
        """Layers that keep their attention."""
        return frozenset(layer for layer, rank in enumerate(self.ranks) if not rank)

    @property
    def uniform(self) -> bool:
        """Return whether all layers share one rank and one list of frequencies."""
        first = self.inv_freq[0]
        return len(set(self.ranks)) == 1 and all(
            f.shape == first.shape and torch.equal(f, first) for f in self.inv_freq
        )
