"""Entry of a low-rank layer whose cache has a packed row of latents per token, kind "quantized_low_rank".

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .layer_entry import LayerEntry
from .low_rank_entry import LowRankEntry
from .token_format import Runs, TokenFormat, runs_problem


@dataclass(frozen=True, kw_only=True)
class QuantizedLowRankEntry(LowRankEntry):
    """Low-rank attention with quantized latents; the blocks follow one another in a row.

    Attributes:
        latent_runs: bytes of the latents in a token's row, see `TokenFormat`.
        first_tokens: tokens at the start of a text whose latents stay in full precision.
    """

    kind = "quantized_low_rank"
    attention = "quantized_low_rank_attention", "QuantizedLowRankAttention"
    has_window = has_bias = quantizes = True

    latent_runs: Runs
    first_tokens: int

    @property
    def format(self) -> TokenFormat:
        """Format of a row."""
        return TokenFormat(self.latent_runs)

    def problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        """Validate the blocks, shared latents, the runs and the number of first tokens."""
        if self.codes or self.streaming or self.window:
            return "codes, streaming and window are not supported with packed rows"
        if self.first_tokens < 0:
            return f"first_tokens must be at least 0, not {self.first_tokens}"
        return super().problem(config, index, entries) or runs_problem(self.latent_runs, sum(self.ranks))
