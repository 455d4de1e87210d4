"""What a converted model looks like, independently of the class that will carry it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.architectures.own_class import kept_tokens


@dataclass(frozen=True)
class MLASpec:
    """Shapes of an MLA conversion; ranks and frequencies per layer. Rank 0 is a layer that keeps its attention."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    hidden: int
    ranks: tuple[int, ...]
    inv_freq: tuple[Tensor, ...]  # per layer [ρ/2], float64
    dtype: torch.dtype  # of the rewritten tensors
    query_bias: bool
    latent_bias: bool  # the source has a key or value bias
    output_bias: bool
    key_norm_eps: float | None  # the source normalises queries and keys per head
    windows: tuple[int | None, ...]
    input_lengths: tuple[float, ...]  # per layer: what inputs of its attention have, the norm's weight as a vector
    key_gains: int = 0  # numbers that its keys are divided by, cached beside the latent
    stateful: frozenset[int] = frozenset()  # layers that keep a state in place of keys and values

    @property
    def layers(self) -> int:
        return len(self.ranks)

    @property
    def kept(self) -> frozenset[int]:
        """Layers that keep their attention."""
        return frozenset(layer for layer, rank in enumerate(self.ranks) if not rank)

    @property
    def uniform(self) -> bool:
        """Whether all layers share one rank and one list of frequencies."""
        first = self.inv_freq[0]
        return len(set(self.ranks)) == 1 and all(
            f.shape == first.shape and torch.equal(f, first) for f in self.inv_freq
        )

    def kv_width(self, layer: int) -> int:
        """Numbers cached per token by one layer."""
        if layer in self.stateful:
            return 0
        if layer in self.kept:
            return self.kv_heads * (self.head_dim + self.value_dim)
        return self.ranks[layer] + 2 * len(self.inv_freq[layer]) + self.key_gains

    def kv_bytes(self, tokens: int) -> int:
        """Bytes that the caches of all layers hold of one sequence, in the dtype of the tensors."""
        held = (self.kv_width(layer) * kept_tokens(tokens, window) for layer, window in enumerate(self.windows))
        return sum(held) * self.dtype.itemsize
