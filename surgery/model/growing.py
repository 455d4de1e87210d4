"""Tensors that grow in place along one dimension, in a buffer with spare capacity.

`torch.cat` would copy the cache at every decode step. Here a tensor is a view of the filled part of a larger buffer,
which it references as an attribute. Tensors derived from the view (selected rows, slices, clones) lose the reference
and are copied once when they grow next. So caches stay plain tensors.

The spare capacity equals the filled size, within 16 and 256 entries, unless a caller reserves more. One copy in 256
steps takes less than a hundredth of the time in which attention reads the cache; more capacity would waste the memory
that a compact cache saves.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_ROOM, MOST_ROOM = 16, 256
"""Bounds of the spare entries in a new buffer."""

_ROOM = "_surgery_room"


@dataclass
class _Room:
    """Buffer of a growing tensor.

    Attributes:
        buffer: the whole allocation.
        filled: entries in use. A view with fewer belongs to a copy of the cache or to a failed step, and must not write
            after its end.
    """

    buffer: Tensor
    filled: int


def append(
    stored: Tensor | None, new: Tensor, dim: int = -2, *, capacity: int = 0, max_size: int | None = None
) -> Tensor:
    """Concatenate `stored` and `new` along a negative dimension, in the buffer of `stored` if it has room.

    Args:
        capacity: entries to allocate memory for, if a new buffer is needed.
        max_size: upper bound of the final size, if known.
    """
    if stored is None:
        stored = new.narrow(dim, 0, 0)
    first, size = stored.shape[dim], stored.shape[dim] + new.shape[dim]
    room: _Room | None = getattr(stored, _ROOM, None)
    if _needs_copy(stored, new):
        return torch.cat([stored, new], dim=dim)
    if room is None or room.filled != first or size > room.buffer.shape[dim] or not _writable(room, new, dim):
        if capacity < size:
            capacity = size + min(max(size, LEAST_ROOM), MOST_ROOM)
            capacity = capacity if max_size is None else min(capacity, max(max_size, size))
        shape = list(new.shape)
        shape[dim] = capacity
        buffer = new.new_empty(shape, dtype=torch.promote_types(stored.dtype, new.dtype))
        buffer.narrow(dim, 0, first).copy_(stored)
        room = _Room(buffer, first)
    room.buffer.narrow(dim, first, new.shape[dim]).copy_(new)
    return _filled(room, dim, size)


def refill(stored: Tensor | None, new: Tensor, dim: int = -2, *, max_size: int) -> Tensor:
    """Return a copy of `new`, in the buffer of `stored` if it is large enough; the two must not overlap.

    `max_size`: upper bound of the final size.
    """
    room: _Room | None = getattr(stored, _ROOM, None)
    if room is None or new.shape[dim] > room.buffer.shape[dim] or _needs_copy(new) or not _writable(room, new, dim):
        return append(None, new, dim, max_size=max_size)
    room.buffer.narrow(dim, 0, new.shape[dim]).copy_(new)
    return _filled(room, dim, new.shape[dim])


def _filled(room: _Room, dim: int, size: int) -> Tensor:
    room.filled = size
    view = room.buffer.narrow(dim, 0, size)
    setattr(view, _ROOM, room)
    return view


def _needs_copy(*tensors: Tensor) -> bool:
    """Return whether buffers must not be shared: autograd needs the tensors, or a compiler cannot track aliases."""
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return needs_gradient or torch.compiler.is_compiling()


def _writable(room: _Room, new: Tensor, dim: int) -> bool:
    """Return whether `new` fits the buffer in dtype, device and all other dimensions, and the buffer is writable."""
    buffer = room.buffer
    entry, shape = list(buffer.shape), list(new.shape)
    entry[dim] = shape[dim] = 0
    alike = (buffer.dtype, buffer.device, entry) == (new.dtype, new.device, shape)
    return alike and (torch.is_inference_mode_enabled() or not buffer.is_inference())
