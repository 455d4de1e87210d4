"""The entry of a layer of MLA, kind "latent".

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .layer_entry import LayerEntry, codes_problem, kv_heads_of

NORM_OVER_HEADS = ("olmo2", "olmo3")
"""Families whose key norm is over all heads together: it divides them by one number."""


@dataclass(frozen=True, kw_only=True)
class LatentEntry(LayerEntry):
    """MLA.

    Attributes:
        kv_lora_rank: r, elements of the latent.
        rope_inv_freq: inverse frequencies of the ρ/2 rotated pairs of the shared key, radians per position.
        key_norm_eps: of the exact q/k-norm path, which keeps `k_proj` and caches inverse rms of keys; None without one.
        codes: formats of `kv_cache` and how many latents have each, in place of its own format.
    """

    kind = "latent"
    attention = "latent_attention", "LatentAttention"
    has_gate = has_rope_part = True

    kv_lora_rank: int
    rope_inv_freq: tuple[float, ...]
    key_norm_eps: float | None
    codes: tuple[tuple[str, int], ...] | None = None

    ranks = property(lambda self: (self.kv_lora_rank,))
    rope_dim = property(lambda self: 2 * len(self.rope_inv_freq))

    def problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        """Return what is wrong with the rank or the codes."""
        # A cache layer with an empty key tensor reports length 0, so a rank of 0 would decode garbage.
        return "kv_lora_rank must be at least 1" if self.kv_lora_rank < 1 else codes_problem(self)

    def key_gains(self, config: Any) -> int:
        """Numbers that a token's keys were divided by: none, one for each KV head, or one for all."""
        family = getattr(config, "base_model_type", None) or config.model_type
        return 0 if self.key_norm_eps is None else 1 if family in NORM_OVER_HEADS else kv_heads_of(config)

    def cached_shape(self, config: Any) -> tuple[int, int, int]:
        """One latent, and next to it the rotated key and the gains of a key norm."""
        return 1, self.kv_lora_rank, self.rope_dim + self.key_gains(config)

    def key_width(self, config: Any) -> int:
        """Return the width of the latent and the rotated key."""
        return self.kv_lora_rank + self.rope_dim
