"""A plugin of pytest: kernels are compiled for a GPU, into Triton's cache on disk, and not run. No GPU is used.

    SURGERY_TARGET=90,132 TRITON_INTERPRET=0 CUDA_VISIBLE_DEVICES= pytest -p gpu_compile -m gpu tests/kernels

The target is a compute capability and a number of multiprocessors. Tests call operations on the CPU, where every launch
asks Triton for the program that a launch on the GPU would ask for: same signature, constants, divisibility and
options, so that the same call finds it there. What a test asserts fails, since nothing is computed, and is no matter.
The file that SURGERY_TESTS names gets a row for each test: seconds, and programs that its process had not met before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_pytest import Rows

_programs: set[str] = set()


def compile_launch(launch: Any, *arguments: Any) -> None:
    """Compile a launch's kernel as it would be for the launch itself, or find it in the cache."""
    program = launch.kernel.warmup(
        *map(_plain, arguments), grid=launch.grid, num_warps=launch.warps, num_stages=launch.stages
    )
    _programs.add(program.hash)


def compile_only(capability: int, processors: int) -> None:
    """Have kernels of this process compiled for a GPU, and tensors on the CPU taken for tensors there."""
    from triton.runtime import driver

    from surgery.kernels import backend, launch, plan, split_kv
    from surgery.kernels.bench.host_cost import NoDriver

    driver.set_active(NoDriver(capability))
    plan._Starter._dispatch = lambda starter, *arguments: compile_launch(starter.launch, *arguments)
    launch.Launch.run = lambda one: compile_launch(one, *(one.arguments[name] for name in one.kernel.arg_names))
    _replace(split_kv.processors, lambda device: processors)
    _replace(launch.capability_of, lambda device: capability)
    _replace(backend.refusal, refusal)


def refusal(*tensors: torch.Tensor | None) -> str | None:
    """Return why no kernel takes tensors of such dtypes on a GPU; None if one does."""
    from surgery.kernels.backend import DTYPES

    dtypes = {each.dtype for each in tensors if each is not None and each.is_floating_point()}
    wrong = {dtype for dtype in dtypes if dtype.itemsize > 1 and dtype not in DTYPES}
    return f"no kernel for {', '.join(map(str, wrong))}" if wrong else None


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _replace(function: Any, other: Any) -> None:
    """Puts another function wherever modules of the project have this one."""
    for name, module in list(sys.modules.items()):
        if name.startswith("surgery.") and getattr(module, function.__name__, None) is function:
            setattr(module, function.__name__, other)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the processes that run tests; the one that deals them out writes rows."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Rows())
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        compile_only(*map(int, os.environ["SURGERY_TARGET"].split(",")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that does not fail, whatever it asserts."""
    before, error = len(_programs), None
    try:
        yield
    except (Exception, pytest.fail.Exception) as caught:
        # What is asserted of numbers that nobody computed says nothing, but where no kernel was reached.
        if not isinstance(caught, AssertionError) or len(_programs) == before:
            error = f"{type(caught).__name__}: {' '.join(str(caught).split())[-300:]}"
    item.user_properties += [("programs", len(_programs) - before), *([("error", error)] if error else [])]
