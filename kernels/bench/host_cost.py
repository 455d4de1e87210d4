"""Host overhead of a decode call of every operation, without a GPU: `python -m surgery.kernels.bench.host_cost`.

A stub driver that launches nothing replaces CUDA's. Kernels are compiled for sm_90 and never run, so only the Python
side of a call is measured: checks, plan, allocation, arguments, and Triton's launch up to the driver. It needs Triton
and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from surgery.kernels import backend, split_kv
from surgery.kernels.bench.registry import cases
from surgery.kernels.plan import forget_plans

OPERATIONS = ("mla_decode", "mla_decode_packed", "lowrank_decode")
PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200."""


class _Utils:
    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 64, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": PROCESSORS, "warpSize": 32}


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


class NoDriver:
    """Stub of Triton's CUDA driver for machines without a GPU."""

    def __init__(self, capability: int = 90) -> None:
        self.utils, self.launcher_cls, self.binary_ext = _Utils(), _Launcher, "cubin"
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def without_gpu() -> None:
    """Install the stub driver in this process, so that operators launch no-op kernels on CPU tensors."""
    if backend.interpreted():
        raise RuntimeError("TRITON_INTERPRET is set: unset it and start again")
    driver.set_active(NoDriver())
    backend.interpreted = lambda: True
    split_kv.processors = lambda device: PROCESSORS


def decoding_calls(tokens: int) -> dict[str, Callable[[], Any]]:
    """Return a decode step by operation, at the shapes of Llama-3-8B: one row with `tokens` cached tokens."""
    calls = {}
    for name in OPERATIONS:
        candidates = cases([name], ["llama3-8b"], [tokens], [1], [torch.float16])
        case = candidates[-1 if name == "lowrank_decode" else 0]
        calls[name] = partial(case.run, case.inputs(torch.device("cpu"), 0))
    return calls


def microseconds(*calls: Callable[[], Any], times: int = 50, repeats: int = 40) -> list[float]:
    """Measure each call's CPU time in this thread: the minimum over interleaved repeats, to exclude other load."""
    least = [float("inf")] * len(calls)
    for _ in range(repeats):
        for index, call in enumerate(calls):
            start = time.thread_time()
            for _ in range(times):
                call()
            least[index] = min(least[index], (time.thread_time() - start) / times * 1e6)
    return least


def main() -> int:
    """Print the table of host costs."""
    without_gpu()
    small = torch.zeros(4), torch.zeros(4)
    print(f"torch {torch.__version__}, triton {triton.__version__}")
    print("| operation | us per call | x torch.add | us with planning |\n|---|---:|---:|---:|")
    with torch.no_grad():
        for name, call in decoding_calls(4096).items():
            call()
            add, cost = microseconds(lambda: torch.add(*small), call)
            (planned,) = microseconds(lambda call=call: (forget_plans(), call()), times=1)
            print(f"| `{name}` | {cost:.0f} | {cost / add:.1f} | {planned:.0f} |", flush=True)
        print(f"| `torch.add` | {add:.1f} | 1 | |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
