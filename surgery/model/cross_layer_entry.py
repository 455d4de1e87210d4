"""The entries of layers that share a cache, kinds "cross_layer…": alike in a group but for the place in it.

Places count from 0 in each group, so that a slice of a model between groups is described by the same entries.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from .latent_entry import LatentEntry
from .layer_entry import LayerEntry, StockEntry


@dataclass(frozen=True, kw_only=True)
class GroupEntry(LayerEntry):
    """Abstract base class of an entry of adjacent layers that share a cache.

    Attributes:
        group_size: layers of the group.
        place: of the layer among them.
        block, sinks, window: see `group_cache`.
    """

    shares_cache = True
    has_gate = True
    block = None
    sinks = window = 0

    group_size: int

    joined = property(lambda self: self.place > 0)

    def cached_shape(self, config: Any) -> tuple[int, int, int]:
        """One token of all keys and values, nothing next to it."""
        heads, key, value = super().cached_shape(config)
        return 1, heads * (key + value), 0

    def problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        """Return what is wrong with the group, or with what stands next to it in the model."""
        if self._group(index, entries) != [replace(self._shared(), place=place) for place in range(self.group_size)]:
            return f"not one of a group of {self.group_size} layers with equal entries"
        counts = [getattr(self, name, None) for name in ("rank", "key_rank", "value_rank", "block")]
        if any(count is not None and count < 1 for count in counts):
            return "ranks and block must be at least 1"
        if any(getattr(self, name, 0) < 0 for name in ("sinks", "window", "kept")):
            return "sinks, window and kept cannot be negative"
        blocks = {entry.block for entry in entries if entry.shares_cache}
        if len(blocks) > 1:
            return f"groups with blocks of {sorted(map(str, blocks))} tokens cannot run together"
        if config.kv_cache is not None:
            return "layers that share a cache cannot quantize it, leave kv_cache out"
        if any(entry.streams or entry.has_window for entry in entries):
            return "layers that share a cache cannot stand beside streaming ones or exact windows"
        return None

    def _group(self, index: int, entries: Sequence[LayerEntry]) -> list[LayerEntry]:
        """Return the entries of its group after checking what they share, and their positions."""
        start = index - self.place
        group = entries[start : start + self.group_size] if start >= 0 <= self.place else ()
        return [entry._shared() if isinstance(entry, GroupEntry) else entry for entry in group]

    def _shared(self) -> "GroupEntry":
        """Return the settings on which the layers of a group must agree, and the position."""
        return self


@dataclass(frozen=True, kw_only=True)
class CrossLayerEntry(GroupEntry):
    """Keys and values of a basis that calibration found, of `rank` elements for all layers of the group."""

    kind = "cross_layer"
    attention = "cross_layer_attention", "CrossLayerAttention"

    rank: int
    block: int
    sinks: int
    window: int
    place: int


@dataclass(frozen=True, kw_only=True)
class SharedMLAEntry(CrossLayerEntry):
    """Entry of a group of layers that share the latents of a base model that is MLA."""

    kind = "cross_layer_mla"
    attention = "cross_layer_latent_attention", "CrossLayerFamilyLatents"

    def cached_shape(self, config: Any) -> tuple[int, int, int]:
        """The family's."""
        return StockEntry().cached_shape(config)


@dataclass(frozen=True, kw_only=True)
class SharedLatentEntry(GroupEntry, LatentEntry):
    """Entry of a group that shares the latents of `LatentEntry`, whose ranks and frequencies may differ by layer."""

    kind = "cross_layer_latent"
    attention = "cross_layer_latent_attention", "CrossLayerLatentAttention"
    has_gate = has_rope_part = False
    ranks = ()
    codes: ClassVar[None] = None

    place: int
    rank: int
    block: int
    sinks: int
    window: int

    def cached_shape(self, config: Any) -> tuple[int, int, int]:
        """Return the cached shape of its latent."""
        return LatentEntry.cached_shape(self, config)

    def _shared(self) -> "GroupEntry":
        return replace(self, kv_lora_rank=0, rope_inv_freq=(), key_norm_eps=None)


@dataclass(frozen=True, kw_only=True)
class PromptBasisEntry(GroupEntry):
    """Keys and values of a basis that each prompt gets, which is compressed as a whole and never in blocks."""

    kind = "cross_layer_prompt"
    attention = "cross_layer_attention", "PromptBasisAttention"

    key_rank: int
    value_rank: int
    place: int


@dataclass(frozen=True, kw_only=True)
class MergedPairEntry(GroupEntry):
    """Two layers merged token by token.

    Attributes:
        kept: tokens of a block that are left unmerged.
        interpolation: the later layer's share of the direction.
    """

    kind = "cross_layer_pairs"
    attention = "cross_layer_attention", "MergedPairAttention"

    block: int
    sinks: int
    window: int
    kept: int
    interpolation: float
    place: int

    def problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        """Return what is wrong with the pair."""
        if self.group_size != 2:
            return f"pairs are groups of 2, not of {self.group_size}"
        return super().problem(config, index, entries)
