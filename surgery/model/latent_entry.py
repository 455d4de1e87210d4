"""Entry of an MLA layer, kind "latent".

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .layer_entry import LayerEntry, codes_problem, kv_heads_of

NORM_OVER_HEADS = ("olmo2", "olmo3")
"""Families whose key norm is over all heads together, with one rms per token."""


@dataclass(frozen=True, kw_only=True)
class LatentEntry(LayerEntry):
    """Multi-head latent attention (MLA).

    Attributes:
        kv_lora_rank: r, elements of the latent.
        rope_inv_freq: inverse frequencies of the ρ/2 rotated pairs of the shared key, radians per position.
        key_norm_eps: epsilon of an exact key norm, which keeps `k_proj` and caches the inverse rms of keys; or None.
        codes: pairs of a `kv_cache` format and a number of latent elements; they override the format of `kv_cache`.
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

    @property
    def value_width(self) -> int:
        """Number of cached channels from which values are read."""
        return self.kv_lora_rank

    def problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        """Validate the rank and the codes."""
        # A cache layer with an empty key tensor reports length 0, so a rank of 0 would decode garbage.
        return "kv_lora_rank must be at least 1" if self.kv_lora_rank < 1 else codes_problem(self)

    def key_gains(self, config: Any) -> int:
        """Return the number of inverse rms values cached per token; 0 without an exact key norm."""
        family = getattr(config, "base_model_type", None) or config.model_type
        return 0 if self.key_norm_eps is None else 1 if family in NORM_OVER_HEADS else kv_heads_of(config)

    def cached_shape(self, config: Any) -> tuple[int, int, int]:
        """Return the shape of the latent, and of the rotated key with the gains of a key norm."""
        return 1, self.kv_lora_rank, self.rope_dim + self.key_gains(config)

    def key_width(self, config: Any) -> int:
        """Return the width of the latent and the rotated key."""
        return self.kv_lora_rank + self.rope_dim
