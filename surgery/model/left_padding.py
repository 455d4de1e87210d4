"""Left padding of batch rows, for caches that treat the first and the last tokens of a row differently.

Masks are built from it on the device. The host only has bounds, read once per prompt: a decode step that reads from the
device would wait for all queued work, and could not be captured in a CUDA graph.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .cache_layer import CompactLayer


class LeftPadding:
    """Number of padding tokens at the start of each row.

    Attributes:
        least, most: bounds of the numbers, not tight after rows were dropped.
        has_gaps: whether a row also has padding after its first real token.
    """

    # Not cache content: `__slots__` hides the tensors from memory measurements that walk attributes.
    __slots__ = ("_copies", "_rows", "has_gaps", "least", "most")

    def __init__(self, rows: Sequence[int] | Tensor, bounds: tuple[int, int] | None = None, *, has_gaps: bool = False):
        """Store the padding tokens of each row; `bounds`, their minimum and maximum, save a wait for the device."""
        self._rows = rows if isinstance(rows, Tensor) else torch.tensor(rows)
        self._copies: dict[torch.device, Tensor] = {}
        self.least, self.most = bounds or (min(rows), max(rows))
        self.has_gaps = has_gaps

    @classmethod
    def of_mask(cls, mask: Tensor) -> LeftPadding:
        """Count the padding in a mask [B, T], zero at padding; waits for the device."""
        real = mask.bool()
        rows = (real.cumsum(-1) == 0).sum(-1)
        gaps = (real.sum(-1) + rows != mask.shape[-1]).any()
        least, greatest, has_gaps = torch.stack([*rows.aminmax(), gaps.long()]).tolist()
        return cls(rows, (least, greatest), has_gaps=bool(has_gaps))

    def on(self, device: torch.device) -> Tensor:
        """Return the padding tokens of each row, int64 [B], on a device; the same tensor at every call."""
        if device not in self._copies:
            self._copies[device] = self._rows.to(device)
        return self._copies[device]

    def changed(self, change: Callable[[Tensor], Tensor]) -> LeftPadding:
        """Return the padding after `change`, which selects or repeats rows along dimension 0."""
        return LeftPadding(change(self._rows), (self.least, self.most), has_gaps=self.has_gaps)

    def tolist(self) -> list[int]:
        """Return the padding tokens of each row; waits for the device."""
        return self._rows.tolist()


def set_padding(cache: Cache, mask: Tensor | None, rows: int | None = None) -> LeftPadding | None:
    """Set the left padding of all cache layers with a `padding` attribute.

    The padding is final once every row has a real token, however the prompt is chunked. All layers get one tensor, so
    that they share masks built from it.

    Args:
        cache: cache whose layers hold the same tokens.
        mask: attention mask [B, cached and new tokens], zero at padding; None without padding.
        rows: batch size, to set zero padding on the layers of an empty cache if there is no mask.

    Returns:
        The padding if this call has set it from the mask, else None.

    Raises:
        ValueError: a mask of another shape, or padding after the first real token among cached tokens. Steps of one
            token are not checked.
    """
    layers = [layer for layer in cache.layers if hasattr(layer, "padding")]
    past_length = cache.get_seq_length()
    layer_padding = next((layer.padding for layer in layers if layer.padding is not None), None)
    if mask is None:
        if rows is not None and layer_padding is None and not past_length:
            _assign(layers, LeftPadding([0] * rows))
        return None
    if getattr(mask, "ndim", None) != 2:
        raise ValueError("attention_mask must be 2D [batch, tokens] with sinks and a window")
    if past_length and (layer_padding is None or layer_padding.most < past_length):
        if layer_padding and (
            layer_padding.has_gaps
            or (mask.shape[1] > past_length + 1 and _contradicts(mask[:, :past_length], layer_padding))
        ):
            raise ValueError("attention_mask has padding after a row's first token; pad on the left")
        return None
    padding = LeftPadding.of_mask(mask)
    _assign(layers, padding)
    return padding


def layer_of(
    cache: Cache | None, index: int, new: CompactLayer, rows: int, padding: LeftPadding | None
) -> CompactLayer:
    """Return layer `index` of the cache, or `new` without a cache, with its padding set.

    Args:
        new: empty layer of the expected class.
        rows: batch size.
        padding: padding for a layer without one; None for no padding.

    Raises:
        ValueError: the cache has a layer of another class.
    """
    layer = new if cache is None else cache.layers[index]
    if not isinstance(layer, type(new)):
        raise ValueError(
            f"layer {index} uses {new.form}, not a {type(layer).__name__}; "
            "pass no cache, an empty DynamicCache, or the cache that the model returned"
        )
    if layer.padding is None:
        layer.padding = padding or LeftPadding([0] * rows)
    return layer


def _assign(layers: list, padding: LeftPadding) -> None:
    for layer in layers:
        layer.padding = padding


def _contradicts(mask: Tensor, padding: LeftPadding) -> bool:
    return bool((mask.bool().sum(-1) + padding.on(mask.device) != mask.shape[1]).any())
