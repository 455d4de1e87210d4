"""A cache of latents of all tokens with exact keys and values of the latest and of the first beside them.

CSKV's bi-branch cache (arXiv:2409.10593) with attention sinks. The latents of recent tokens are kept as well, so that a
token that leaves the window has nothing to be computed again.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .cache_layer import CompactLayer
from .left_padding import LeftPadding
from .plain_cache import PlainLayer
from .sink_window_cache import SinkWindowLayer


class ExactWindowLayer(CompactLayer):
    """The cache of one layer.

    Attributes:
        latents: those of all tokens [B, 1, S, r], plain or quantized.
        exact: the `sinks` first and `window` - 1 last tokens' exact numbers.
    """

    form = "a cache of latents with an exact window"

    def __init__(self, sinks: int, window: int, latents: CompactLayer | None = None) -> None:
        """A window of 1 is a query's own token; `latents` is a layer to keep those in, a plain one by default.

        Raises:
            ValueError: unless `sinks` ≥ 0 and `window` ≥ 1.
        """
        super().__init__()
        self.exact = SinkWindowLayer(sinks, window)
        self.latents = PlainLayer() if latents is None else latents

    def settings(self) -> tuple:
        """Sinks, window, and how the latents are kept."""
        return *self.exact.settings(), type(self.latents), self.latents.settings()

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes after `tokens` tokens; `key_dim` is the width of the latents, `value_dim` of the exact numbers."""
        exact = exact_window_tokens(*self.exact.settings(), tokens) * value_dim
        size = {"batch": batch, "heads": heads, "key_dim": key_dim, "value_dim": 0, "dtype": dtype}
        return self.latents.predicted_bytes(tokens, **size) + batch * heads * exact * dtype.itemsize

    def updates(self, cached: Any, past_length: int, new: int) -> Iterator[int]:
        """Bytes after an update, which copies exact tokens, and latents where they are dequantized."""
        exact = exact_window_tokens(*self.exact.settings(), past_length) + new
        latents = 0 if type(self.latents) is PlainLayer else past_length + new
        read = latents * cached.key_dim + exact * cached.value_dim
        yield cached.held(past_length + new) + cached.batch * cached.heads * read * cached.dtype.itemsize

    @property
    def padding(self) -> LeftPadding | None:
        """Number of padding tokens at the start of each row."""
        return self.exact.padding

    @padding.setter
    def padding(self, padding: LeftPadding) -> None:
        self.exact.padding = padding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes batch, widths, dtype and device from the first tokens."""
        self.latents.lazy_initialization(key_states, key_states[..., :0])
        self.exact.lazy_initialization(value_states, value_states[..., :0])
        self.is_initialized = True

    def visible(self, queries: int, device: torch.device) -> Tensor:
        """Return which of the exact tokens that `update` will return the next `queries` tokens see: see
        `SinkWindowLayer`."""
        return self.exact.visible(queries, device)

    def slots(self, queries: int, device: torch.device) -> Tensor:
        """Positions of those tokens in each row [B, s + w + queries]; those that nobody sees are anywhere."""
        return self.exact.slots(queries, device)

    def update(self, latent: Tensor, exact: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Adds latents [B, 1, n, r] and exact numbers [B, 1, n, e]; returns those of all, and of the exact, tokens."""
        if not self.is_initialized:
            self.lazy_initialization(latent, exact)
        latent, _ = self.latents.update(latent, latent[..., :0])
        exact, _ = self.exact.update(exact, exact[..., :0])
        return latent, exact

    def get_seq_length(self) -> int:
        """Tokens that have come."""
        return self.exact.seen

    def reserve(self, tokens: int) -> None:
        """Allocate memory for the latents of that many tokens at once."""
        self.latents.reserve(tokens)

    def reset(self) -> None:
        """Forgets all tokens."""
        self.latents.reset()
        self.exact.reset()
        self.is_initialized = False

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        self.exact._map_rows(change)
        self.latents._map_rows(change)


def exact_window_tokens(sinks: int, window: int, tokens: int) -> int:
    """Tokens of `tokens` whose exact numbers an `ExactWindowLayer` holds between two forward passes."""
    return min(tokens, sinks + window - 1)
