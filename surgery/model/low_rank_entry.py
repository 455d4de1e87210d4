"""Entry of a layer that rebuilds keys and values from latents, kind "low_rank".

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .layer_entry import LayerEntry, codes_problem, head_dim_of, kv_heads_of, window_problem


@dataclass(frozen=True)
class Block:
    """Latent of a subset of the KV heads.

    Attributes:
        rank: number of latent elements.
        keys, values: KV heads whose keys, and whose values, are rebuilt from the latent.
    """

    rank: int
    keys: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class StreamingBlocks:
    """Indices of the blocks whose latents are kept for the first and the last tokens only."""

    blocks: tuple[int, ...]
    sinks: int
    recent: int


@dataclass(frozen=True, kw_only=True)
class LowRankEntry(LayerEntry):
    """Low-rank attention.

    Attributes:
        has_bias: whether rebuilt keys and values get a bias even if the family's own have none.
        blocks: the blocks; every key head and every value head is in exactly one.
        shared_layers: number of layers before this one whose latents it reads.
        shared_rank: latent elements of those layers in all.
        sinks, window: first and latest tokens that a query reads in full precision, its own included; 0 for none.
        codes: pairs of a `kv_cache` format and a number of latent elements; they override the format of `kv_cache`.
        streaming: blocks that are not kept for all tokens.
    """

    kind = "low_rank"
    attention = "low_rank_attention", "LowRankAttention"
    nested = {"blocks": Block, "streaming": StreamingBlocks}  # noqa: RUF012
    has_gate, has_bias = True, False

    blocks: tuple[Block, ...]
    shared_layers: int = 0
    shared_rank: int = 0
    sinks: int = 0
    window: int = 0
    codes: tuple[tuple[str, int], ...] | None = None
    streaming: StreamingBlocks | None = None

    streams = property(lambda self: self.streaming is not None)
    gives_weights = property(lambda self: not self.streaming)
    has_window = property(lambda self: self.window > 0)
    joined = property(lambda self: self.shared_layers > 0)
    ranks = property(lambda self: tuple(block.rank for block in self.blocks))

    def cached_shape(self, config: Any) -> tuple[int, int, int]:
        """Return the shape of all latents, and of the full-precision keys and values of a window."""
        return 1, sum(self.ranks), 2 * kv_heads_of(config) * head_dim_of(config) if self.window else 0

    def width(self, config: Any) -> int:
        """Return the number of latent elements; only tokens of a window have keys and values as well."""
        heads, latents, _ = self.cached_shape(config)
        return heads * latents

    def problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        """Validate the blocks, the window, shared latents and streaming blocks."""
        problem = (self.streaming and self._streaming_problem()) or codes_problem(self) or self._blocks_problem(config)
        return problem or self._sharing_problem(config, index, entries)

    def _blocks_problem(self, config: Any) -> str | None:
        heads = list(range(kv_heads_of(config)))
        if min(self.ranks, default=0) < 1:
            return "a block's rank must be at least 1"
        for name in ("keys", "values"):
            if sorted(head for block in self.blocks for head in getattr(block, name)) != heads:
                return f"the blocks' {name} must list each of the {len(heads)} KV heads once"
        if self.sinks and not self.window:
            return "sinks require a window of at least 1"
        return None

    def _sharing_problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        first = index - self.shared_layers
        if first < 0 or (self.shared_layers and len(self.blocks) > 1):
            return "shared_layers requires that many layers before this one, and a single block"
        earlier = entries[first:index]
        if any(other.kind != self.kind for other in earlier):
            return "shared_layers may count low_rank layers only"
        if any(other.streams for other in earlier):
            return "shared_layers may not count layers with streaming blocks"
        types = getattr(config, "layer_types", None)
        if types is not None and len(set(types[first : index + 1])) > 1:
            return "layers that share latents must have the same layer type"
        shared = sum(sum(other.ranks) for other in earlier)
        if shared != self.shared_rank:
            return f"shared_rank is {self.shared_rank}, but the ranks of the shared layers add up to {shared}"
        return None

    def _streaming_problem(self) -> str | None:
        numbers, blocks = self.streaming.blocks, self.blocks
        if not numbers or len(set(numbers)) != len(numbers) or not set(numbers) <= set(range(len(blocks))):
            return f"streaming blocks {list(numbers)} must be distinct indices below {len(blocks)}"
        keys = sorted(head for number in numbers for head in blocks[number].keys)
        values = sorted(head for number in numbers for head in blocks[number].values)
        if keys != values:
            return f"streaming blocks must hold keys and values of the same heads, not {keys} and {values}"
        if self.window or self.shared_layers:
            return "streaming blocks are not supported with window or shared_layers"
        return window_problem(self.streaming.sinks, self.streaming.recent)
