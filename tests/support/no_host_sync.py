"""A mode in which calls that make the host wait for a device raise, on any device: CPU tests watch GPU code with it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Functions that read a tensor in Python, and those that make one of Python's data.
READS = {"tolist", "numpy", "__array__", "cpu"}
CONSTANTS = {"tensor", "as_tensor", "asarray", "new_tensor", "from_numpy"}
# Operators whose result, or its shape, the host has to know: `item`, `int` and `bool` of tensors among them.
OPERATORS = {"_local_scalar_dense", "allclose", "bincount", "equal", "is_nonzero", "masked_select", "nonzero"}
OPERATORS |= {"nonzero_static", "_unique2", "unique_consecutive", "unique_dim"}
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
COPIES = {"_to_copy", "copy_"}
TORCH, TRANSFORMERS = str(Path(torch.__file__).parent), "/transformers/"


class HostSyncError(AssertionError):
    """A call that makes the host wait for a device, or copies a constant to it."""


class NoHostSync:
    """Context manager: ``.item()``, ``.tolist()``, ``nonzero``, boolean indexing, new constants and the like raise.

    Operators of this project are looked at from outside: on a GPU they are kernels, in tests their references.
    """

    def __init__(self, *, strict: bool = True, allow_transformers: bool = False) -> None:
        """Watch a ``with`` block.

        Args:
            strict: raise where Python reads or makes whole tensors, too. A step in a CUDA graph may not; what reads
                files or prepares batches has tensors on the host.
            allow_transformers: let transformers' own code pass: it reads padded masks.
        """
        self._strict, self._allow_transformers, self._inside = strict, allow_transformers, False

    def __enter__(self) -> NoHostSync:
        self._modes = ExitStack()
        self._modes.enter_context(_Functions(self))
        self._modes.enter_context(_Operators(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._modes.__exit__(*error)

    def refuse(self, reason: str, *, strict: bool = False) -> None:
        """Raise HostSyncError with the line that called, unless that may pass."""
        if self._inside or (strict and not self._strict):
            return
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((__file__, TORCH)):
            frame = frame.f_back
        if self._allow_transformers and frame is not None and TRANSFORMERS in frame.f_code.co_filename:
            return
        raise HostSyncError(f"{reason}, at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else reason)


class _Functions(TorchFunctionMode):
    def __init__(self, watch: NoHostSync) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", None)
        if name in READS:
            self._watch.refuse(f"{name} reads the device", strict=True)
        if name in CONSTANTS and not isinstance(args[-1], Tensor):
            self._watch.refuse(f"{name} makes a constant", strict=True)
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, watch: NoHostSync) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs, name, watch = kwargs or {}, operator.overloadpacket.__name__, self._watch
        if operator.namespace == "surgery" and not watch._inside:
            watch._inside = True
            try:
                return operator(*args, **kwargs)
            finally:
                watch._inside = False
        if reason := _reason(name, args, kwargs):
            watch.refuse(f"{operator}: {reason}")
        # Python's lists, as an index too; a number that is written to a tensor is an argument of a kernel.
        if name == "lift_fresh" and args[0].dim():
            watch.refuse(f"{operator}: a new constant", strict=True)
        return operator(*args, **kwargs)


def _reason(name: str, args: tuple, kwargs: dict) -> str | None:
    """Return why an operator of ATen synchronizes; None: it does not."""
    if name in OPERATORS:
        return "the host reads the result"
    if name == "repeat_interleave" and isinstance(args[-1], Tensor) and kwargs.get("output_size") is None:
        return "the host reads the length of the result: pass output_size"
    if name in INDEXING and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
        # One value for all masked elements is a masked_fill.
        return None if len(args) > 2 and args[2].numel() == 1 else "the host counts the elements of a boolean index"
    if name in COPIES and _crosses(name, args, kwargs):
        return "a copy between host and device"
    return None


def _crosses(name: str, args: tuple, kwargs: dict) -> bool:
    other = args[1].device if name == "copy_" else kwargs.get("device") or args[0].device
    return (args[0].device.type == "cpu") != (torch.device(other).type == "cpu")
