"""One launch of a Triton kernel as a value, so that what runs on a GPU is what is compiled and checked without one."""

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
    """Configuration of a kernel's tiling; a kernel has no use for some fields.

    Attributes:
        block_rows: query rows (heads × new tokens) of one program.
        block_tokens: cached tokens of one step of its loop.
        chunk: elements of a token that one product takes at once, where a row is wider than a tile should be.
        splits: programs that share the tokens of one row and are merged afterwards; None leaves it to
            `split_count`.
        warps, stages: of the program, and of its software pipeline.
    """

    block_rows: int = 16
    block_tokens: int = 64
    chunk: int = 64
    splits: int | None = None
    warps: int = 4
    stages: int = 2


class Extent(int):
    """The size or stride of a tensor as a number that knows where it comes from.

    A plan (`plan.py`) outlives the call that it was made for: it reads extents from the tensors of every call.

    Attributes:
        tensor, dim: the tensor and its dimension.
        is_stride: whether it is the stride of the dimension, not its size.
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
    """A kernel, its grid and everything it is given.

    Attributes:
        kernel: a `triton.jit` function.
        grid: programs along up to three axes.
        arguments: all parameters of the kernel by name, constants of compilation included; tensors, numbers or None.
        warps, stages: as in `Config`.
        scratch: those of the arguments that are memory for this launch and the ones after it, no inputs or results.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any] = field(repr=False)
    warps: int = 4
    stages: int = 2
    scratch: tuple[Tensor, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, kernel: Any, grid: tuple[int, ...], config: Config, args: Mapping[str, Any], **others: Any) -> Launch:
        """A launch of what the kernel's parameters are called in `others` or else in `args`."""
        values = {**args, **others}
        return cls(kernel, grid, {name: values[name] for name in kernel.arg_names}, config.warps, config.stages)

    def run(self) -> None:
        """Launches on the device of its tensors, or in Triton's interpreter under TRITON_INTERPRET=1."""
        if 0 in self.grid:
            return
        # Triton takes plain integers only.
        arguments = {name: int(each) if isinstance(each, Extent) else each for name, each in self.arguments.items()}
        device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
        # Triton launches on the current device, and a model may be spread over several.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](**arguments, num_warps=self.warps, num_stages=self.stages)


def signature_of(reference: Callable, *settings: str) -> inspect.Signature:
    """Arguments of an operation: its annotated reference's, and settings that kernels alone use, optional integers."""
    optional = inspect.Parameter("_", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=int | None)
    own = inspect.signature(reference, eval_str=True)
    return own.replace(parameters=[*own.parameters.values(), *(optional.replace(name=name) for name in settings)])


def naming(signature: inspect.Signature) -> Callable[[tuple, Mapping[str, Any]], dict[str, Any]]:
    """Gives all arguments of a call by name, with those that it leaves to their defaults, as PyTorch does."""
    names = tuple(signature.parameters)
    defaults = {name: each.default for name, each in signature.parameters.items() if each.default is not each.empty}
    return lambda args, kwargs: {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def launches_of(reference: Callable, *settings: str) -> Callable:
    """Decorates `launches(args, *, out, lse, …)`: called with the arguments of an operation, it has them in `args`.

    They are those of its plain reference and the settings behind them, so that no kernel spells them anew.
    """
    signature = signature_of(reference, *settings)
    bind, names = naming(signature), frozenset(signature.parameters)

    def decorate(function: Callable[..., list[Launch]]) -> Callable[..., list[Launch]]:
        @wraps(function)
        def launches(*args: Any, **kwargs: Any) -> list[Launch]:
            own = {name: kwargs.pop(name) for name in kwargs.keys() - names}
            return function(SimpleNamespace(**bind(args, kwargs)), **own)

        return launches

    return decorate


def size(tensor: Tensor, dim: int) -> Extent:
    """The size of a dimension, to be read at every call; kernels must not specialize on it (`do_not_specialize`)."""
    return Extent(tensor, dim, is_stride=False)


def strides(*axes: str, **tensors: Tensor | None) -> dict[str, int]:
    """Strides of the first dimensions of tensors as kernels name them: `key_row`, `key_token`; 0 of None."""
    return {
        f"{name}_{axis}": 0 if tensor is None else Extent(tensor, place, is_stride=True)
        for name, tensor in tensors.items()
        for place, axis in enumerate(axes)
    }


def capability_of(device: torch.device) -> int:
    """80 for compute capability 8.0; 90 for whatever is no GPU."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
