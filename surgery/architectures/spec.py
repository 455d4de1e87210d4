"""Shapes of a converted model, independent of its target architecture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MLASpec:
    """Shapes of an MLA conversion, with ranks and frequencies per layer. A layer of rank 0 keeps its attention."""

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
    key_norm_eps: float | None  # of the source's q/k-norm; None without one
    windows: tuple[int | None, ...]
    input_lengths: tuple[float, ...]  # per layer: L2 norm of attention inputs, that of the input norm's weight

    @property
    def layers(self) -> int:
        return len(self.ranks)

    @property
    def kept(self) -> frozenset[int]:
        """Layers that keep their attention."""
        return frozenset(layer for layer, rank in enumerate(self.ranks) if not rank)

    @property
    def uniform(self) -> bool:
        """True if all layers have the same rank and frequencies."""
        first = self.inv_freq[0]
        return len(set(self.ranks)) == 1 and all(
            f.shape == first.shape and torch.equal(f, first) for f in self.inv_freq
        )
