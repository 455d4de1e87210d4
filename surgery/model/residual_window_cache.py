"""Cache of the latents of all tokens, with full-precision keys and values of a residual window and of sinks.

The bi-branch cache of CSKV (arXiv:2409.10593) with attention sinks. Recent tokens have latents as well, so that nothing
has to be computed when a token leaves the window.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .cache_layer import CompactLayer
from .left_padding import LeftPadding
from .plain_cache import PlainLayer
from .sink_window_cache import SinkWindowLayer


class ResidualWindowLayer(CompactLayer):
    """Cache layer of latents with a residual window and sinks.

    Attributes:
        latents: layer of the latents of all tokens [B, 1, S, r], plain or quantized.
        exact: layer of the full-precision keys and values of the first `sinks` and the last `window` - 1 tokens.
    """

    form = "a cache of latents with a residual window"

    def __init__(self, sinks: int, window: int, latents: CompactLayer | None = None) -> None:
        """Make an empty layer; a window of 1 is the query's own token, and `latents` is a plain layer by default.

        Raises:
            ValueError: unless `sinks` ≥ 0 and `window` ≥ 1.
        """
        super().__init__()
        self.exact = SinkWindowLayer(sinks, window)
        self.latents = PlainLayer() if latents is None else latents

    def settings(self) -> tuple:
        """Return the sinks, the window, and the class and settings of the latents' layer."""
        return *self.exact.settings(), type(self.latents), self.latents.settings()

    def predicted_bytes(
        self, tokens: int, *, batch: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> int:
        """Predict the bytes after `tokens` tokens of `key_dim` latent and `value_dim` full-precision elements."""
        exact = min(tokens, sum(self.exact.settings()) - 1) * value_dim
        size = {"batch": batch, "heads": heads, "key_dim": key_dim, "value_dim": 0, "dtype": dtype}
        return self.latents.predicted_bytes(tokens, **size) + batch * heads * exact * dtype.itemsize

    @property
    def padding(self) -> LeftPadding | None:
        """Left padding of each row."""
        return self.exact.padding

    @padding.setter
    def padding(self, padding: LeftPadding) -> None:
        self.exact.padding = padding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take batch size, widths, dtype and device from the first tokens."""
        self.latents.lazy_initialization(key_states, key_states[..., :0])
        self.exact.lazy_initialization(value_states, value_states[..., :0])
        self.is_initialized = True

    def visible(self, queries: int, device: torch.device) -> Tensor:
        """Return the mask of the full-precision tokens that `update` will return, see `SinkWindowLayer.visible`."""
        return self.exact.visible(queries, device)

    def slots(self, queries: int, device: torch.device) -> Tensor:
        """Return the positions [B, s + w + queries] of these tokens; arbitrary for tokens that the mask hides."""
        return self.exact.slots(queries, device)

    def update(self, latent: Tensor, exact: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append latents [B, 1, n, r] and full-precision elements [B, 1, n, e]; return both of all cached tokens."""
        if not self.is_initialized:
            self.lazy_initialization(latent, exact)
        latent, _ = self.latents.update(latent, latent[..., :0])
        exact, _ = self.exact.update(exact, exact[..., :0])
        return latent, exact

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.exact.seen

    def reserve(self, tokens: int) -> None:
        """Have the first update allocate memory for the latents of `tokens` tokens."""
        self.latents.reserve(tokens)

    def reset(self) -> None:
        """Drop all tokens."""
        self.latents.reset()
        self.exact.reset()
        self.is_initialized = False

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        self.exact._map_rows(change)
        self.latents._map_rows(change)
