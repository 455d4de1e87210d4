"""Entry of a layer with full and streaming heads, kind "hybrid".

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .grouped_entry import GroupedEntry
from .layer_entry import LayerEntry, window_problem


@dataclass(frozen=True, kw_only=True)
class HybridEntry(GroupedEntry):
    """Attention with full heads, which see all tokens, and streaming heads, which see sinks and a window.

    Attributes:
        full_heads: KV heads that see all tokens; they come first.
        sinks, recent: first and last tokens that streaming heads see, the query's own included.
        head_order: the source's KV head at each index; a record that the model does not read.
        compensated_heads: 0, in checkpoints of earlier versions.
    """

    kind = "hybrid"
    attention = "hybrid_attention", "HybridAttention"
    has_gate = False
    streams = True
    gives_weights = property(lambda self: not self.streaming_heads)

    full_heads: int
    sinks: int
    recent: int
    head_order: tuple[int, ...]
    compensated_heads: int | None = None

    @property
    def streaming_heads(self) -> int:
        """Number of KV heads that stream."""
        return self.kv_heads - self.full_heads

    def problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        """Validate the numbers of heads, their order and the window."""
        if problem := super().problem(config, index, entries):
            return problem
        heads = self.kv_heads
        if not 0 <= self.full_heads <= heads:
            return f"full_heads must be 0 to {heads}, not {self.full_heads}"
        if self.compensated_heads:
            return "compensated_heads are of an earlier version; convert the source again"
        if sorted(self.head_order) != list(range(heads)):
            return f"head_order must list each of the {heads} KV heads once"
        return window_problem(self.sinks, self.recent)
