"""Tensors that grow along one dimension in place, in memory with some room to spare.

`torch.cat` copies a cache at every step of decoding and moves it. Here a tensor is a view of the filled part of a
larger buffer, which it carries with it; whatever else is made of the view (rows selected, a slice, a clone) carries
none and moves once when it grows next. So caches stay plain tensors.

The room to spare is as much as is filled, but no less than 16 entries and no more than 256, or what a caller reserves.
Copying the cache once in 256 steps takes less than a hundredth of the time in which attention reads it; more room would
take memory that the cache is there to save.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_ROOM, MOST_ROOM = 16, 256
"""Entries to spare in memory that is allocated anew."""

_ROOM = "_surgery_room"


@dataclass
class _Room:
    """The memory behind a growing tensor.

    Attributes:
        buffer: all of it.
        filled: entries that some view holds. A view with fewer is of a copy of the cache, or of a step that failed, and
            must not write behind its end.
    """

    buffer: Tensor
    filled: int


def append(
    stored: Tensor | None, new: Tensor, dim: int = -2, *, capacity: int = 0, max_size: int | None = None
) -> Tensor:
    """Return `stored` and after it `new`, along a negative dimension; in the memory of `stored` if there is room.

    Args:
        capacity: entries to have memory for, if it has to be allocated.
        max_size: entries that there will ever be, if that is known.
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
    """Return a copy of `new`, in the memory of `stored` if that is large enough; they must not overlap.

    `max_size`: entries that there will ever be.
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
    """Return whether memory must not be shared: gradients go through it, or a compiler cannot see who else holds it."""
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return needs_gradient or torch.compiler.is_compiling()


def _writable(room: _Room, new: Tensor, dim: int) -> bool:
    """Return whether entries of `new` fit the buffer: dtype, device and the other dimensions are those of it."""
    buffer = room.buffer
    entry, shape = list(buffer.shape), list(new.shape)
    entry[dim] = shape[dim] = 0
    alike = (buffer.dtype, buffer.device, entry) == (new.dtype, new.device, shape)
    return alike and (torch.is_inference_mode_enabled() or not buffer.is_inference())
