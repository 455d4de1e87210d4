"""`python -m surgery.kernels.bench.host_cost`: the CPU time of one decoding call of every operation, without a GPU.

A driver that launches nothing takes the place of CUDA's. Kernels are compiled for sm_90 and never run, so what is left
is what Python does for a call: checks, plan, memory, arguments, and Triton's launch up to the driver. It runs with
Triton alone, in a process that does not interpret kernels (no TRITON_INTERPRET).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from surgery.kernels import backend, split_kv
from surgery.kernels.gqa_decode.operator import gqa_decode
from surgery.kernels.gqa_decode_quantized.operator import gqa_decode_quantized
from surgery.kernels.hybrid_decode.operator import hybrid_decode
from surgery.kernels.lowrank_decode.operator import lowrank_decode, rotation_tables
from surgery.kernels.mla_decode.operator import mla_decode
from surgery.kernels.mla_decode.quantized_operator import mla_decode_quantized
from surgery.kernels.plan import forget_plans

PROCESSORS = 132
"""Multiprocessors of an H100 or H200."""


class _Utils:
    """The functions of a driver that load kernels and describe the device."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 64, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": PROCESSORS, "warpSize": 32}


class _Launcher:
    """Launches nothing."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


class NoDriver:
    """Triton's driver of a GPU that is not there."""

    def __init__(self, capability: int = 90) -> None:
        self.utils, self.launcher_cls, self.binary_ext = _Utils(), _Launcher, "cubin"
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def without_gpu() -> None:
    """Has operators of this process launch kernels, which do nothing, on tensors of the CPU."""
    if backend.interpreted():
        raise RuntimeError("kernels are interpreted in this process: start it without TRITON_INTERPRET")
    driver.set_active(NoDriver())
    backend.interpreted = lambda: True
    split_kv.processors = lambda device: PROCESSORS


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Tensors whose numbers nobody looks at."""
    return torch.zeros(shape, dtype=dtype)


def coded(tokens: int, width: int, by_channel: bool, heads: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of 4 bits in groups of 32, their scales and zero points."""
    rows = (1, heads) if heads else (1,)
    scales = zeros(*rows, *((tokens // 32, width) if by_channel else (tokens, width // 32)))
    return zeros(*rows, tokens // 2, width, dtype=torch.uint8), scales, zeros(*scales.shape)


def decoding_calls(tokens: int) -> dict[str, Callable[[], Any]]:
    """A step at the shapes of Llama-3-8B, by operation: one row of so many tokens."""
    lengths = torch.full((1,), tokens, dtype=torch.int32)
    query, latent_query = zeros(1, 1, 32, 128), zeros(1, 1, 32, 576)
    key, value = zeros(1, 8, tokens, 128), zeros(1, 8, tokens, 128)
    full, streaming = zeros(1, 4, tokens, 128), zeros(1, 4, 320, 128)
    latent, rope_key = zeros(1, tokens, 512), zeros(1, tokens, 64)
    joint, key_up = zeros(1, tokens, 1024), zeros(8, 128, 256)
    rotation = rotation_tables(10000.0 ** -(torch.arange(0, 128, 2) / 128), tokens)
    ranges = [(head // 2 * 256, 256, head // 2 * 256, 256) for head in range(8)]
    latents = (*coded(tokens, 512, True), *coded(tokens, 64, False))
    heads = (*coded(tokens, 128, True, 8), *coded(tokens, 128, False, 8))
    window = {"sink_slots": 64, "sinks": 64, "recent": 256, "lengths": lengths}
    by_channel = {"format": "int4", "group": 32, "lengths": lengths}
    return {
        "mla_decode": lambda: mla_decode(latent_query, latent, rope_key, 0.1, lengths=lengths),
        "mla_decode_quantized": lambda: mla_decode_quantized(
            latent_query, *latents, 0.1, by_channel=True, **by_channel
        ),
        "gqa_decode": lambda: gqa_decode(query, key, value, 0.1, lengths=lengths),
        "gqa_decode_quantized": lambda: gqa_decode_quantized(query, *heads, 0.1, **by_channel),
        "lowrank_decode": lambda: lowrank_decode(
            query, joint, key_up, 0.1, rotation=rotation, ranges=ranges, lengths=lengths
        ),
        "hybrid_decode": lambda: hybrid_decode(query, full, full, streaming, streaming, 0.1, **window),
    }


def microseconds(*calls: Callable[[], Any], times: int = 50, repeats: int = 40) -> list[float]:
    """CPU time of each call in this thread: the least mean of many, in turns, since other programs slow all down."""
    least = [float("inf")] * len(calls)
    for _ in range(repeats):
        for index, call in enumerate(calls):
            start = time.thread_time()
            for _ in range(times):
                call()
            least[index] = min(least[index], (time.thread_time() - start) / times * 1e6)
    return least


def main() -> int:
    """Prints a table."""
    without_gpu()
    small = zeros(4), zeros(4)
    print(f"torch {torch.__version__}, triton {triton.__version__}")
    print("| operation | us a call | x torch.add | us of a call that is planned |\n|---|---:|---:|---:|")
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
