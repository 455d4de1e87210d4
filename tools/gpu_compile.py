"""Pytest plugin that compiles kernels into Triton's disk cache without a GPU, instead of running them.

    SURGERY_TARGET=90,132 TRITON_INTERPRET=0 CUDA_VISIBLE_DEVICES= pytest -p gpu_compile -m gpu tests/kernels

The target is a compute capability and a number of multiprocessors. Tests call operations on the CPU, where every launch
compiles the program that a launch on the GPU would need: same signature, constants, divisibility and options. So the
same call on the GPU finds it in the cache. Assertions of tests fail, since nothing is computed, and are ignored. The
file of SURGERY_TESTS gets a row for each test: seconds, and programs that are new to its process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_pytest import Rows

_programs: set[str] = set()


def compile_launch(launch: Any, *arguments: Any) -> None:
    """Compile the kernel of a launch with the launch's specialization, or find it in the cache."""
    program = launch.kernel.warmup(
        *map(_plain, arguments), grid=launch.grid, num_warps=launch.warps, num_stages=launch.stages
    )
    _programs.add(program.hash)


def compile_only(capability: int, processors: int) -> None:
    """Patch this process to compile kernels for a GPU and to treat CPU tensors as tensors on that GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from surgery.kernels import backend, launch, plan, split_kv

    target = GPUTarget("cuda", capability, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )
    plan._Starter._dispatch = lambda starter, *arguments: compile_launch(starter.launch, *arguments)
    launch.Launch.run = lambda one: compile_launch(one, *(one.arguments[name] for name in one.kernel.arg_names))
    _replace(split_kv.processors, lambda device: processors)
    _replace(launch.capability_of, lambda device: capability)
    _replace(backend.refusal, refusal)


def refusal(*tensors: torch.Tensor | None) -> str | None:
    """Return the reason why no kernel supports the dtypes of these tensors on a GPU, or None."""
    from surgery.kernels.backend import DTYPES

    dtypes = {each.dtype for each in tensors if each is not None and each.is_floating_point()}
    wrong = {dtype for dtype in dtypes if dtype.itemsize > 1 and dtype not in DTYPES}
    return f"no kernel for {', '.join(map(str, wrong))}" if wrong else None


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _replace(function: Any, other: Any) -> None:
    """Replace a function in all modules of the package that have imported it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("surgery.") and getattr(module, function.__name__, None) is function:
            setattr(module, function.__name__, other)


def pytest_configure(config: pytest.Config) -> None:
    """Patch the processes that run tests; the controller of pytest-xdist writes the rows."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Rows())
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        compile_only(*map(int, os.environ["SURGERY_TARGET"].split(",")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run a test and record errors instead of failing."""
    before, error = len(_programs), None
    try:
        yield
    except (Exception, pytest.fail.Exception) as caught:
        # Assertions on values that were not computed say nothing, unless no kernel was reached.
        if not isinstance(caught, AssertionError) or len(_programs) == before:
            error = f"{type(caught).__name__}: {' '.join(str(caught).split())[-300:]}"
    item.user_properties += [("programs", len(_programs) - before), *([("error", error)] if error else [])]
