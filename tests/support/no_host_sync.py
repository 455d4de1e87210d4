"""A mode in which what makes the host wait for a device raises, on any device: with it, CPU tests watch GPU code."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Functions by name: those that read a tensor in Python, and those that make one of Python's data.
FUNCTIONS = {"tolist", "numpy", "__array__", "cpu", "tensor", "as_tensor", "asarray", "new_tensor"}
# Operators whose result, or its shape, the host has to know.
OPERATORS = {
    "_local_scalar_dense",
    "allclose",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
COPIES = {"_to_copy", "copy_"}


class HostSyncError(RuntimeError):
    """A call that makes the host wait for a device, or copies a constant to it."""


class NoHostSync:
    """Context manager: ``.item()``, ``.tolist()``, ``nonzero``, boolean indexing, new constants and the like raise."""

    def __enter__(self) -> NoHostSync:
        self._modes = ExitStack()
        self._modes.enter_context(_Functions())
        self._modes.enter_context(_Operators())
        return self

    def __exit__(self, *error) -> None:
        self._modes.__exit__(*error)


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", None) in FUNCTIONS:
            raise HostSyncError(function.__name__)
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        reason = _reason(operator.overloadpacket.__name__, args, kwargs or {})
        if reason:
            raise HostSyncError(f"{operator}: {reason}")
        return operator(*args, **(kwargs or {}))


def _reason(name: str, args: tuple, kwargs: dict) -> str | None:
    """Why an operator of ATen synchronises; None: it does not."""
    if name in OPERATORS:
        return "the host reads the result"
    if name == "repeat_interleave" and isinstance(args[-1], Tensor) and kwargs.get("output_size") is None:
        return "the host reads the length of the result: pass output_size"
    if name in INDEXING and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
        return "the host counts the elements of a boolean index"
    # Python's lists, as an index too; a number that is written to a tensor is an argument of a kernel.
    if name == "lift_fresh" and args[0].dim():
        return "a new constant"
    if name in COPIES and _crosses(name, args, kwargs):
        return "a copy between host and device"
    return None


def _crosses(name: str, args: tuple, kwargs: dict) -> bool:
    other = args[1].device if name == "copy_" else kwargs.get("device") or args[0].device
    return (args[0].device.type == "cpu") != (torch.device(other).type == "cpu")
