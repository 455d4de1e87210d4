"""Padding at the start of rows, as caches know it that treat first and last tokens apart.

Masks are made of it on the device. The host knows bounds only, read once for a prompt: a step of decoding that had to
read the device would wait for all work before it, and could not be recorded in a CUDA graph.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .cache_layer import CompactLayer


class LeftPadding:
    """Tokens that each row starts with and that are padding.

    Attributes:
        least, most: bounds of their number in a row; after rows were dropped not the narrowest.
        has_gaps: whether padding came after the first token of a row too.
    """

    # Positions, and no part of what a cache holds: `__slots__` keeps them out of measurements that walk attributes.
    __slots__ = ("_copies", "_rows", "has_gaps", "least", "most")

    def __init__(self, rows: Sequence[int] | Tensor, bounds: tuple[int, int] | None = None, *, has_gaps: bool = False):
        """`rows`: tokens of padding, one number a row, which `bounds` say without waiting for a device."""
        self._rows = rows if isinstance(rows, Tensor) else torch.tensor(rows)
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.least, self.most = bounds or (min(rows), max(rows))
        self.has_gaps = has_gaps

    @classmethod
    def of_mask(cls, mask: Tensor) -> LeftPadding:
        """Read the padding off a mask [B, T], zero at padding."""
        real = mask.bool()
        rows = (real.cumsum(-1) == 0).sum(-1)
        gaps = (real.sum(-1) + rows != mask.shape[-1]).any()
        least, greatest, has_gaps = torch.stack([*rows.aminmax(), gaps.long()]).tolist()
        return cls(rows, (least, greatest), has_gaps=bool(has_gaps))

    def on(self, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
        """The number of each row [B]; the same tensor at every call."""
        if (device, dtype) not in self._copies:
            self._copies[device, dtype] = self._rows.to(device, dtype)
        return self._copies[device, dtype]

    def changed(self, change: Callable[[Tensor], Tensor]) -> LeftPadding:
        """The padding of rows that `change`, which acts on dimension 0, selects."""
        return LeftPadding(change(self._rows), (self.least, self.most), has_gaps=self.has_gaps)

    def tolist(self) -> list[int]:
        """The number of each row; waits for the device."""
        return self._rows.tolist()


def set_padding(cache: Cache, mask: Tensor | None, rows: int | None = None) -> LeftPadding | None:
    """Tell the layers with a `padding` how many tokens each row starts with that are none.

    Known once a real token of every row has come, whatever chunks a prompt comes in. One tensor for all layers, so that
    they share what is made of it.

    Args:
        cache: one whose layers have seen the same tokens.
        mask: [B, tokens that came and that come now], zero at padding; None without any.
        rows: of the batch, to tell the layers of a new cache without a mask that there is no padding.

    Returns:
        The padding of each row if this call tells it, else None.

    Raises:
        ValueError: a mask of another form, or padding after the first real token among tokens that came earlier. Steps
            of one token are not looked at.
    """
    layers = [layer for layer in cache.layers if hasattr(layer, "padding")]
    past_length = cache.get_seq_length()
    layer_padding = next((layer.padding for layer in layers if layer.padding is not None), None)
    if mask is None:
        if rows is not None and layer_padding is None and not past_length:
            _tell(layers, LeftPadding([0] * rows))
        return None
    if getattr(mask, "ndim", None) != 2:
        raise ValueError("the attention mask is a prepared one: with sinks and a window it must be [batch, tokens]")
    if past_length and (layer_padding is None or layer_padding.most < past_length):
        if layer_padding and (
            layer_padding.has_gaps
            or (mask.shape[1] > past_length + 1 and _contradicts(mask[:, :past_length], layer_padding))
        ):
            raise ValueError("the attention mask has padding after a row's first token: pad on the left")
        return None
    padding = LeftPadding.of_mask(mask)
    _tell(layers, padding)
    return padding


def layer_of(
    cache: Cache | None, index: int, new: CompactLayer, rows: int, padding: LeftPadding | None
) -> CompactLayer:
    """The cache's layer `index`, or `new` for one call where there is no cache; its padding is known from here on.

    Args:
        new: an empty layer of the class that is wanted.
        rows: of the batch.
        padding: of this call; None is none.

    Raises:
        ValueError: the cache has a layer of another class.
    """
    layer = new if cache is None else cache.layers[index]
    if not isinstance(layer, type(new)):
        raise ValueError(
            f"layer {index} keeps {new.form} and was given a {type(layer).__name__}: "
            "pass no cache, an empty DynamicCache, or the cache that the model returned"
        )
    if layer.padding is None:
        layer.padding = padding or LeftPadding([0] * rows)
    return layer


def _tell(layers: list, padding: LeftPadding) -> None:
    for layer in layers:
        layer.padding = padding


def _contradicts(mask: Tensor, padding: LeftPadding) -> bool:
    return bool((mask.bool().sum(-1) + padding.on(mask.device) != mask.shape[1]).any())
