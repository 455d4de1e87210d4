"""A mode for steps of decoding that raises where the host would wait for a GPU, or send it something made of Python.

The first stalls every step; both keep a step from being recorded in a CUDA graph. It works on any device, so that tests
without a GPU see what a step would do on one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
SYNCHRONISING = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.nonzero_static,
    aten.masked_select,
    aten.equal,
    aten.is_nonzero,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
}
"""Operators whose result, or the size of it, the host has to know: `.item()`, `bool()` and `int()` of tensors too."""
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.item, Tensor.__array__}
CONSTANTS = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor}
MASKS = (torch.bool, torch.uint8)
SUBSCRIPTS = {Tensor.__getitem__, Tensor.__setitem__}
TORCH, TRANSFORMERS = str(Path(torch.__file__).parent), "/transformers/"


class NotAStep(AssertionError):
    """Something in a step of decoding waits for the device or copies to it."""


@contextmanager
def decode_mode(*, allow_transformers: bool = False) -> Iterator[None]:
    """Raise `NotAStep` for what no step of decoding may do.

    Operators of the project's own are looked at from outside: on a GPU they are kernels, in tests their references.

    Args:
        allow_transformers: let pass what transformers' own code does: it reads padded masks.
    """
    watch = _Watch(allow_transformers)
    with _Functions(watch), _Operators(watch):
        yield


@dataclass
class _Watch:
    """What both modes know.

    Attributes:
        inside: whether one of the project's operators runs.
    """

    allow_transformers: bool
    inside: bool = False

    def refuse(self, what: str) -> None:
        if self.inside:
            return
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((__file__, TORCH)):
            frame = frame.f_back
        if self.allow_transformers and frame is not None and TRANSFORMERS in frame.f_code.co_filename:
            return
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "nowhere"
        raise NotAStep(f"{what} in a step of decoding, at {place}")


class _Operators(TorchDispatchMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        packet, kwargs = function.overloadpacket, kwargs or {}
        if function.namespace == "surgery":
            self._watch.inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self._watch.inside = False
        if packet in SYNCHRONISING or function is aten.repeat_interleave.Tensor:
            self._watch.refuse(str(function))
        if packet in INDEXING and any(index is not None and index.dtype in MASKS for index in args[1]):
            self._watch.refuse(f"{function} with a mask")
        return function(*args, **kwargs)


class _Functions(TorchFunctionMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in READS:
            self._watch.refuse(function.__name__)
        if function in CONSTANTS and not isinstance(args[-1], Tensor):
            self._watch.refuse(f"{function.__name__} of Python numbers")
        if function in SUBSCRIPTS and any(isinstance(each, list | range) for each in _subscripts(args[1])):
            self._watch.refuse("an index that is a list")
        if function is torch.where and any(isinstance(each, bool | int | float) for each in args[1:]):
            self._watch.refuse("torch.where of a Python number")
        return function(*args, **kwargs or {})


def _subscripts(index: Any) -> tuple:
    return index if isinstance(index, tuple) else (index,)
