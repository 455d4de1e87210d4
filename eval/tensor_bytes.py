"""Bytes that tensors really take: found inside any object, and counted by the storage that they share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of plain tensors: views of one storage by their own elements, at most the storage, the same view once."""
    views: dict[tuple[torch.device, int], dict[tuple, int]] = {}
    limits: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        views.setdefault(key, {})[view] = tensor.numel() * tensor.element_size()
        limits[key] = storage.nbytes()
    return sum(min(limits[key], sum(ranges.values())) for key, ranges in views.items())


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Every plain tensor reachable from an object through attributes and containers, but not through modules."""
    yield from _walk(value, set())


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; weights that are tied, as an embedding and its head, count once."""
    return storage_bytes(plain_tensors([*model.parameters(), *model.buffers()]))


def _walk(value: Any, ids: set[int]) -> Iterator[Tensor]:
    if id(value) in ids or isinstance(value, nn.Module | type):
        return
    ids.add(id(value))
    if isinstance(value, Tensor):
        if not is_traceable_wrapper_subclass(value):
            yield value
            return
        # Quantized tensors of torchao and quanto own no storage: they wrap codes, scales and zero points.
        children = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    elif isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        children = list(value)
    else:
        children = list(getattr(value, "__dict__", {}).values())
    for child in children:
        yield from _walk(child, ids)
