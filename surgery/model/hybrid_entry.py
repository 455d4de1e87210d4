"""The entry of a layer whose heads differ in what they see, kind "hybrid".

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .grouped_entry import GroupedEntry
from .layer_entry import LayerEntry, Windows, window_problem


@dataclass(frozen=True, kw_only=True)
class HybridEntry(GroupedEntry):
    """KV heads of which the first see all tokens, the others the first tokens and a window.

    Attributes:
        full_heads: KV heads that see all tokens.
        compensated_heads: the last of the others, with a token in the place of what they dropped (see `hybrid_cache`).
        sinks, recent: first and last tokens that the others see, a query's own included.
        head_order: a record: the source's KV head that stands at each place.
    """

    kind = "hybrid"
    attention = "hybrid_attention", "HybridAttention"
    has_gate = False
    streams = True

    full_heads: int
    compensated_heads: int
    sinks: int
    recent: int
    head_order: tuple[int, ...]

    @property
    def streaming_heads(self) -> int:
        """KV heads that do not see all tokens."""
        return self.kv_heads - self.full_heads

    def problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        """Return what is wrong with the numbers of heads, their order or the window."""
        if problem := super().problem(config, index, entries):
            return problem
        heads, full, compensated = self.kv_heads, self.full_heads, self.compensated_heads
        if full < 0 or compensated < 0 or full + compensated > heads:
            return f"{full} full and {compensated} compensated heads are not to be had of {heads} KV heads"
        if sorted(self.head_order) != list(range(heads)):
            return f"head_order is not the {heads} KV heads, each once"
        return window_problem(self.sinks, self.recent)

    def windows(self, config: Any) -> Windows:
        """Query heads that see all tokens, those that stream, and those of them that are compensated."""
        size, window = config.num_attention_heads // self.kv_heads, self.sinks + self.recent
        plain = self.streaming_heads - self.compensated_heads
        return [
            (self.full_heads * size, None, False),
            (plain * size, window, False),
            (self.compensated_heads * size, window, True),
        ]
