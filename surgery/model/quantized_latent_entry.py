"""Entry of an MLA layer whose cache has a packed row of quantized values per token, kind "quantized_latent".

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .latent_entry import LatentEntry
from .layer_entry import LayerEntry
from .token_format import Runs, TokenFormat, runs_problem


@dataclass(frozen=True, kw_only=True)
class QuantizedLatentEntry(LatentEntry):
    """MLA with quantized latents and quantized, unrotated shared keys.

    Attributes:
        latent_runs, rope_runs: bytes of the latent and of the shared key after it in a token's row, see `TokenFormat`.
        first_tokens: tokens at the start of a text that stay in full precision.
        predicts_values: values are read from latent and shared key, and the latent holds what the key does not tell.
    """

    kind = "quantized_latent"
    attention = "quantized_latent_attention", "QuantizedLatentAttention"
    has_rope_part = False
    has_window = quantizes = True
    ranks = ()

    latent_runs: Runs
    rope_runs: Runs
    first_tokens: int
    predicts_values: bool | None = None

    @property
    def value_width(self) -> int:
        # No `super().value_width`: torch.compile cannot read a property of a parent class.
        return self.kv_lora_rank + (self.rope_dim if self.predicts_values else 0)

    @property
    def correcting(self) -> int:
        """Number of channels that make up for the rounding of the others, see `TokenQuantizer`."""
        return self.kv_lora_rank if self.predicts_values else 0

    @property
    def format(self) -> TokenFormat:
        """Format of a row: latent, then shared key."""
        return TokenFormat((*self.latent_runs, *self.rope_runs))

    def problem(self, config: Any, index: int, entries: Sequence[LayerEntry]) -> str | None:
        """Validate the rank, the runs and the number of first tokens."""
        if self.kv_lora_rank < 1:
            return "kv_lora_rank must be at least 1"
        if self.codes is not None:
            return "codes are not supported; latent_runs and rope_runs set the format"
        if self.first_tokens < 0:
            return f"first_tokens must be at least 0, not {self.first_tokens}"
        latent = runs_problem(self.latent_runs, self.kv_lora_rank)
        return latent or runs_problem(self.rope_runs, self.rope_dim)
