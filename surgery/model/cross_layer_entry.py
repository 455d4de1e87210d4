"""Entries of layers that share a cache, kinds "cross_layer…"; in a group they differ in `index_in_group` only.

`index_in_group` counts from 0 in each group, so that the entries stay valid in a model that is sliced between groups.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from .latent_entry import LatentEntry
from .layer_entry import LayerEntry, StockEntry


@dataclass(frozen=True, kw_only=True)
class GroupEntry(LayerEntry):
    """Abstract base class of the entries of adjacent layers that share a cache.

    Attributes:
        group_size: number of layers in the group.
        index_in_group: index of the layer in the group.
        block, sinks, window: see `group_cache`.
    """

    shares_cache = True
    has_gate = True
    block = None
    sinks = window = 0

    group_size: int

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> LayerEntry:
        """Parse an entry; checkpoints of older versions name `index_in_group` place."""
        return super().from_entry({"index_in_group" if key == "place" else key: entry[key] for key in entry})

    joined = property(lambda self: self.index_in_group > 0)

    def cached_shape(self, config: Any) -> tuple[int, int, int]:
        """Return the shape of a token: one head with all keys and values, no further elements."""
        heads, key, value = super().cached_shape(config)
        return 1, heads * (key + value), 0

    def problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        """Validate the group, and its combination with the other layers."""
        if self._group(index, entries) != [
            replace(self._shared(), index_in_group=member) for member in range(self.group_size)
        ]:
            return f"its group must have {self.group_size} adjacent layers with equal entries"
        counts = [getattr(self, name, None) for name in ("rank", "key_rank", "value_rank", "block")]
        if any(count is not None and count < 1 for count in counts):
            return "ranks and block must be at least 1"
        if any(getattr(self, name, 0) < 0 for name in ("sinks", "window", "kept")):
            return "sinks, window and kept must be at least 0"
        blocks = {entry.block for entry in entries if entry.shares_cache}
        if len(blocks) > 1:
            return f"all groups must have the same block, not {sorted(map(str, blocks))}"
        if config.kv_cache is not None:
            return "kv_cache is not supported with shared caches; leave it out"
        if any(entry.streams or entry.has_window for entry in entries):
            return "shared caches are not supported next to streaming layers or residual windows"
        return None

    def _group(self, index: int, entries: Sequence[LayerEntry]) -> list[LayerEntry]:
        """Return the group's entries, reduced to equal settings and `index_in_group`; empty if out of range."""
        start = index - self.index_in_group
        group = entries[start : start + self.group_size] if start >= 0 <= self.index_in_group else ()
        return [entry._shared() if isinstance(entry, GroupEntry) else entry for entry in group]

    def _shared(self) -> "GroupEntry":
        """Return the entry with only the settings that must be equal in a group, and `index_in_group`."""
        return self


@dataclass(frozen=True, kw_only=True)
class CrossLayerEntry(GroupEntry):
    """Keys and values in a basis found by calibration, with `rank` elements per token for the whole group."""

    kind = "cross_layer"
    attention = "cross_layer_attention", "CrossLayerAttention"

    rank: int
    block: int
    sinks: int
    window: int
    index_in_group: int


@dataclass(frozen=True, kw_only=True)
class SharedMLAEntry(CrossLayerEntry):
    """Shared latents of a base model with MLA."""

    kind = "cross_layer_mla"
    attention = "cross_layer_latent_attention", "CrossLayerFamilyLatents"

    def cached_shape(self, config: Any) -> tuple[int, int, int]:
        """Return the cached shape of the family's MLA."""
        return StockEntry().cached_shape(config)


@dataclass(frozen=True, kw_only=True)
class SharedLatentEntry(GroupEntry, LatentEntry):
    """Shared latents of `LatentEntry`, whose ranks and frequencies may differ by layer."""

    kind = "cross_layer_latent"
    attention = "cross_layer_latent_attention", "CrossLayerLatentAttention"
    has_gate = has_rope_part = False
    ranks = ()
    codes: ClassVar[None] = None

    index_in_group: int
    rank: int
    block: int
    sinks: int
    window: int

    def cached_shape(self, config: Any) -> tuple[int, int, int]:
        """Return the cached shape of the latent."""
        return LatentEntry.cached_shape(self, config)

    def _shared(self) -> "GroupEntry":
        return replace(self, kv_lora_rank=0, rope_inv_freq=(), key_norm_eps=None)


@dataclass(frozen=True, kw_only=True)
class PromptBasisEntry(GroupEntry):
    """Keys and values in a basis computed from each prompt, which is compressed as a whole and not in blocks."""

    kind = "cross_layer_prompt"
    attention = "cross_layer_attention", "PromptBasisAttention"

    key_rank: int
    value_rank: int
    index_in_group: int


@dataclass(frozen=True, kw_only=True)
class MergedPairEntry(GroupEntry):
    """Two layers whose tokens are merged.

    Attributes:
        kept: unmerged tokens per block.
        interpolation: weight of the later layer in the direction, t of SLERP.
    """

    kind = "cross_layer_pairs"
    attention = "cross_layer_attention", "MergedPairAttention"

    block: int
    sinks: int
    window: int
    kept: int
    interpolation: float
    index_in_group: int

    def problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        """Validate the pair."""
        if self.group_size != 2:
            return f"group_size must be 2 for merged pairs, not {self.group_size}"
        return super().problem(config, index, entries)
