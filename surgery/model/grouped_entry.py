"""Entry of a layer of the family's own attention with another number of KV heads, kind "grouped".

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .layer_entry import LayerEntry, head_dim_of


@dataclass(frozen=True, kw_only=True)
class GroupedEntry(LayerEntry):
    """Grouped-query attention with `kv_heads` KV heads in place of the config's `num_key_value_heads`."""

    kind = "grouped"
    attention = "grouped_attention", "GroupedAttention"
    has_gate = True

    kv_heads: int

    def problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        """Validate the number of KV heads."""
        if self.kv_heads < 1 or config.num_attention_heads % self.kv_heads:
            return f"{config.num_attention_heads} query heads must be a multiple of {self.kv_heads} KV heads"
        return None

    def cached_shape(self, config: Any) -> tuple[int, int, int]:
        """Return the shape of the keys and values of `kv_heads` heads."""
        return self.kv_heads, head_dim_of(config), head_dim_of(config)
