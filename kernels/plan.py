"""Plans: launches of an operation that are prepared once and reused by all calls with the same key.

Checks, configuration, splits, grids and arguments follow from dtypes, devices, shapes, strides and settings: the key of
a plan. A plan stays valid while a sequence grows. For the token dimension the key holds the bit length of its size,
since splits change at powers of two only (`split_count`); for strides that depend on that size, the properties that
Triton specializes on. A plan reads the size and these strides from every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.launch import Extent, Launch

Growth = tuple[Mapping[str, int], ...]
"""Dimension that grows with the sequence, by argument name; in groups of tensors that usually have equal sizes."""

Results = tuple[Tensor, ...] | Tensor | None
Run = Callable[[Sequence[Any], list[int]], Results]
"""Function that runs a call, given its arguments in the order of the schema and the extents from `Layout.key`."""

MOST_PLANS = 1024
"""Capacity of each cache of an operation: of its plans, and of its exact call keys."""

TENSORS = frozenset((Tensor, torch.nn.Parameter))
"""Tensor types with storage of their own, unlike subclasses such as fake or functional tensors."""


class Cache(dict[Any, Any]):
    """Dictionary of at most `MOST_PLANS` entries, cleared when it is full and by `forget_plans`."""

    def __init__(self) -> None:
        _caches.append(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        if len(self) >= MOST_PLANS:
            self.clear()
        super().__setitem__(key, value)


_caches: list[Cache] = []


def forget_plans() -> None:
    """Clear all plans, so that the next call of each operation is planned again."""
    for cache in _caches:
        cache.clear()


class Layout:
    """Argument layout of an operation: names in the order of the schema, tensors or None, and growing dimensions.

    Dimensions grow with the sequence. In calls with `pages` only the page table grows.
    """

    def __init__(self, names: Sequence[str], tensors: set[str], growth: Growth) -> None:
        self.names = tuple(names)
        self._tensors = [index for index, name in enumerate(self.names) if name in tensors]
        settings = [index for index, name in enumerate(self.names) if name not in tensors]
        # The first index twice, since `itemgetter` of a single index returns no tuple.
        self._settings = itemgetter(settings[0], *settings)
        self._pages = self.names.index("pages") if "pages" in tensors else None
        self._dense = self._entries(tensors, growth)
        self._paged = () if self._pages is None else self._entries(tensors, ({"pages": 1},))

    def _entries(self, tensors: set[str], growth: Growth) -> tuple[tuple[int, int, int], ...]:
        growing = {name: (dim, group) for group, names in enumerate(growth) for name, dim in names.items()}
        # Growing tensors first, so that the first of each group comes before the rest of it.
        order = [*growing, *(name for name in self.names if name in tensors and name not in growing)]
        return tuple((self.names.index(name), *growing.get(name, (-1, 0))) for name in order)

    def entries(self, values: Sequence[Any]) -> tuple[tuple[int, int, int], ...]:
        """Return index, growing dimension (or -1) and group of each tensor argument."""
        return self._dense if self._pages is None or values[self._pages] is None else self._paged

    def extents(self, values: Sequence[Any]) -> list[tuple[int, int, bool]]:
        """Return the tensor's `id`, the dimension and `is_stride` of each extent that `key` reads, in its order."""
        return [
            (id(values[index]), axis, is_stride)
            for index, dim, _ in self.entries(values)
            if dim >= 0 and values[index] is not None
            for is_stride in (False, True)
            for axis in range(values[index].dim())
        ]

    def exact_key(self, values: Sequence[Any], needs_gradient: bool = False) -> tuple[Any, ...] | None:
        """Return everything that a plan and its extents depend on; cheap, since it is computed at every call.

        None if a tensor is a subclass without storage of its own, or requires a gradient that is needed.
        """
        key = [*self._settings(values)]
        for index in self._tensors:
            tensor = values[index]
            if tensor is None:
                key.append(None)
                continue
            if type(tensor) not in TENSORS or (needs_gradient and tensor.requires_grad):
                return None
            # Triton specializes on pointers that are multiples of 16.
            key += tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15
        return tuple(key)

    def key(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], list[int]]:
        """Return the key of the plan, stable while a sequence grows, and sizes and strides of the growing tensors."""
        key, extents, leaders = [*self._settings(values)], [], {}
        for index, dim, group in self.entries(values):
            tensor = values[index]
            if tensor is None:
                key.append(None)
                continue
            numbers = [*tensor.shape, *tensor.stride()]
            if 0 <= dim < tensor.dim():
                extents += numbers
                size = numbers[dim]
                leader = leaders.setdefault(group, size)
                numbers[dim] = (size, leader) if size != leader else size.bit_length()
                # In a dense tensor the strides outside the token dimension scale with its size; others stay constant.
                dense = size * tensor.stride(dim)
                for axis in range(dim - 1, -1, -1):
                    stride = tensor.stride(axis)
                    if stride == dense:
                        numbers[tensor.dim() + axis] = _kind(stride)
                    dense *= tensor.shape[axis]
            key += (*numbers, tensor.dtype, tensor.device, tensor.data_ptr() & 15)
        return tuple(key), extents


def _kind(stride: int) -> tuple[int, int]:
    """Return what Triton specializes on for a stride or half of it: multiple of 16, 1, over 32 bits; and parity."""
    return stride.bit_length(), stride % 32 if stride % 16 == 0 else 1 + stride % 2


class Plan:
    """Launches of a call, reusable with the tensors of any call of the same key.

    Kernel arguments are picked from one list: the call's arguments, all distinct tensors, its extents, newly allocated
    results and scratch, and constants. There are no, one or two outputs, of the same shapes in any call of the key.
    """

    def __init__(self, layout: Layout, values: Sequence[Any], outputs: Results, launches: Sequence[Launch]) -> None:
        launches = [launch for launch in launches if 0 not in launch.grid]
        self._is_single, self._has_results = isinstance(outputs, Tensor), outputs is not None
        outputs = (outputs,) if self._is_single else outputs or ()
        memory = (*outputs, *(tensor for launch in launches for tensor in launch.scratch))
        extents = layout.extents(values)
        first = len(values) + len(extents)
        self._out, self._device = first, next(value.device for value in values if isinstance(value, Tensor))
        self._is_cuda = self._device.type == "cuda"
        # An expanded scalar: `empty_like` takes less host time than `empty` with a shape and a dtype.
        self._memory = [torch.empty(1, dtype=like.dtype, device=self._device).expand(like.shape) for like in memory]
        self._constants: list[Any] = []
        positions: dict[Any, int] = {id(value): at for at, value in enumerate(values) if isinstance(value, Tensor)}
        positions |= {extent: len(values) + at for at, extent in enumerate(extents)}
        positions |= {id(tensor): first + at for at, tensor in enumerate(memory)}

        def position(value: Any) -> int:
            is_extent = isinstance(value, Extent)
            source = positions.get((id(value.tensor), value.dim, value.is_stride) if is_extent else id(value))
            if source is not None:
                return source
            self._constants.append(int(value) if is_extent else value)
            return first + len(memory) + len(self._constants) - 1

        self.steps: list[tuple[Callable[[list[Any]], tuple[Any, ...]], _Starter]] = []
        for launch in launches:
            order = [position(launch.arguments[name]) for name in launch.kernel.arg_names]
            # Drop the tensors, which would keep the first call's cache alive.
            self.steps.append((itemgetter(*order), _Starter(replace(launch, arguments={}, scratch=()))))

    def __call__(self, values: Sequence[Any], extents: list[int]) -> Results:
        """Run all launches on the device of the tensors and return the results."""
        # Triton launches on the current device, and a model may be spread over several.
        if self._is_cuda and self._device.index != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self(values, extents)
        flat = [*values, *extents, *map(torch.empty_like, self._memory), *self._constants]
        for pick, starter in self.steps:
            starter.start(*pick(flat))
        if not self._has_results:
            return None
        return flat[self._out] if self._is_single else (flat[self._out], flat[self._out + 1])


class _Starter:
    """Kernel launch that goes through Triton's dispatch once and then starts the compiled kernel directly.

    Triton binds and specializes arguments at every launch, which takes as long as the rest of a call. A plan's key
    holds all that Triton specializes on, so the compiled kernel is valid for every call of the plan.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.start: Callable[..., Any] = self._dispatch

    def _dispatch(self, *arguments: Any) -> None:
        launch = self.launch
        kernel = launch.kernel[launch.grid](*arguments, num_warps=launch.warps, num_stages=launch.stages)
        # Neither the interpreter's result nor a kernel that still compiles in the background.
        if hasattr(type(kernel), "__getitem__"):
            self.start = _direct(kernel, (*launch.grid, 1, 1)[:3])


def _direct(kernel: Any, grid: tuple[int, int, int]) -> Callable[..., Any]:
    """Return a function that starts a compiled kernel as the end of `JITFunction.run` does.

    Triton builds the launch metadata for profiler hooks at every launch, which takes longer than the launch itself;
    here it is built only if hooks are set.
    """
    from triton import knobs
    from triton.runtime import driver

    described, active, hooks, (x, y, z) = kernel[grid], driver.active, knobs.runtime, grid
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata

    def start(*arguments: Any) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            described(*arguments)
        else:
            stream = active.get_current_stream(active.get_current_device())
            run(x, y, z, stream, function, metadata, None, None, None, *arguments)

    return start
