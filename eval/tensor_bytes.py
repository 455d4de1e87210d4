"""Storage bytes of the tensors inside any object; tensors that share a storage are counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of plain tensors: equal views once, views by their elements, at most the whole storage."""
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
    """Yield every plain tensor reachable from an object through attributes and containers, but not through modules."""
    yield from _walk(value, set())


def weight_bytes(model: nn.Module) -> int:
    """Count the bytes of all parameters and buffers; tied weights, such as embedding and LM head, count once."""
    return storage_bytes(plain_tensors([*model.parameters(), *model.buffers()]))


def _walk(value: Any, ids: set[int]) -> Iterator[Tensor]:
    if id(value) in ids or isinstance(value, nn.Module | type):
        return
    ids.add(id(value))
    if isinstance(value, Tensor):
        if not is_traceable_wrapper_subclass(value):
            yield value
            return
        # Quantized tensors of torchao and quanto own no storage: they wrap quantized values, scales and zero points.
        children = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    elif isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        children = list(value)
    else:
        children = list(getattr(value, "__dict__", {}).values())
    for child in children:
        yield from _walk(child, ids)
