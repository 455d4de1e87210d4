"""Entry of an MLA layer that keeps sinks and a window only, kind "latent" with `streaming`.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .latent_entry import LatentEntry
from .layer_entry import LayerEntry, window_problem


@dataclass(frozen=True)
class Streaming:
    """Numbers of first and last tokens with latents, the query's own included."""

    sinks: int
    recent: int


@dataclass(frozen=True, kw_only=True)
class StreamingLatentEntry(LatentEntry):
    """MLA in which all heads see sinks and a window only."""

    attention = "streaming_latent_attention", "StreamingLatentAttention"
    nested = {"streaming": Streaming}  # noqa: RUF012
    streams = True
    gives_weights = False

    streaming: Streaming

    def problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        """Validate the window, the rank and the codes."""
        window = window_problem(self.streaming.sinks, self.streaming.recent)
        return window or super().problem(config, index, entries)
