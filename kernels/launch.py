"""Triton kernel launches as values, so that tests compile without a GPU exactly the kernels that a GPU runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Config:
    """Tiling configuration of a kernel; not every kernel uses every field.

    Attributes:
        block_rows: query rows (heads × new tokens) per program.
        block_tokens: cached tokens per loop iteration.
        chunk: elements of a token per `tl.dot`, for rows that are wider than a tile.
        splits: programs that share the tokens of one row, merged afterwards; None for `split_count`.
        warps, stages: Triton's `num_warps` and `num_stages`.
    """

    block_rows: int = 16
    block_tokens: int = 64
    chunk: int = 64
    splits: int | None = None
    warps: int = 4
    stages: int = 2


class Extent(int):
    """Size or stride of a tensor as an integer that remembers its tensor and dimension.

    A plan (`plan.py`) is reused by later calls and reads the extents from the tensors of each call.

    Attributes:
        tensor, dim: the tensor and its dimension.
        is_stride: True for the stride of the dimension, False for its size.
    """

    tensor: Tensor
    dim: int
    is_stride: bool

    def __new__(cls, tensor: Tensor, dim: int, *, is_stride: bool) -> Extent:
        value = tensor.stride(dim) if is_stride else tensor.shape[dim]
        extent = super().__new__(cls, value)
        extent.tensor, extent.dim, extent.is_stride = tensor, dim, is_stride
        return extent


@dataclass(frozen=True)
class Launch:
    """`triton.jit` kernel with its grid along up to three axes and arguments by name, `tl.constexpr` ones included.

    ``scratch`` names temporary memory for this launch and later ones; ``warps`` and ``stages`` are as in `Config`.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any] = field(repr=False)
    warps: int = 4
    stages: int = 2
    scratch: tuple[Tensor, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, kernel: Any, grid: tuple[int, ...], config: Config, args: Mapping[str, Any], **others: Any) -> Launch:
        """Build a launch; each kernel parameter is taken by name from `others`, or else from `args`."""
        values = {**args, **others}
        return cls(kernel, grid, {name: values[name] for name in kernel.arg_names}, config.warps, config.stages)

    def run(self) -> None:
        """Launch on the device of the tensors, or in Triton's interpreter under TRITON_INTERPRET=1."""
        if 0 in self.grid:
            return
        # Triton accepts plain integers only.
        arguments = {name: int(each) if isinstance(each, Extent) else each for name, each in self.arguments.items()}
        device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
        # Triton launches on the current device, and a model may be spread over several.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**arguments, num_warps=self.warps, num_stages=self.stages)


def naming(signature: inspect.Signature) -> Callable[[tuple, Mapping[str, Any]], dict[str, Any]]:
    """Return a function that maps the arguments of a call to their names, defaults included."""
    names = tuple(signature.parameters)
    defaults = {name: each.default for name, each in signature.parameters.items() if each.default is not each.empty}
    return lambda args, kwargs: {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def launches_of(reference: Callable) -> Callable:
    """Decorate `launches(args, *, out, lse, …)` so that it takes the operation's arguments and gets them as `args`.

    The arguments are those of the PyTorch reference, so that no kernel repeats the signature.
    """
    signature = inspect.signature(reference, eval_str=True)
    bind, names = naming(signature), frozenset(signature.parameters)

    def decorate(function: Callable[..., list[Launch]]) -> Callable[..., list[Launch]]:
        @wraps(function)
        def launches(*args: Any, **kwargs: Any) -> list[Launch]:
            own = {name: kwargs.pop(name) for name in kwargs.keys() - names}
            return function(SimpleNamespace(**bind(args, kwargs)), **own)

        return launches

    return decorate


def size(tensor: Tensor, dim: int) -> Extent:
    """Return the size of a dimension, read again at every call; kernels must list it in `do_not_specialize`."""
    return Extent(tensor, dim, is_stride=False)


def strides(*axes: str, **tensors: Tensor | None) -> dict[str, int]:
    """Return the strides of the leading dimensions by kernel parameter, such as `key_row`; 0 for None."""
    return {
        f"{name}_{axis}": 0 if tensor is None else Extent(tensor, dim, is_stride=True)
        for name, tensor in tensors.items()
        for dim, axis in enumerate(axes)
    }


def capability_of(device: torch.device) -> int:
    """Return the compute capability as an integer, 80 for 8.0; 90 if the device is not a CUDA GPU."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
