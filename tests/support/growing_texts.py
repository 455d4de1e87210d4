"""Counts what steps of decoding plan and compile while a text grows; prints JSON: growing_texts.py TOKENS FIRST...

A process of its own, without Triton's interpreter: Triton dispatches as on a GPU, and compiling is left out.
"""

import json
import sys
from types import SimpleNamespace

import torch
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from surgery.kernels import backend
from surgery.kernels.lowrank_decode.operator import _lowrank_decode, lowrank_decode, rotation_tables
from surgery.kernels.mla_decode.operator import _mla_decode, mla_decode
from surgery.kernels.mla_decode.packed_operator import _mla_decode_packed, mla_decode_packed

compilations = []


def zeros(*shape, dtype=torch.float16):
    return torch.zeros(shape, dtype=dtype)


class Kernel:
    """A compiled kernel that does nothing."""

    function = packed_metadata = None

    def __init__(self, source, **options):
        compilations.append(source.fn.__name__)

    def launch_metadata(self, *arguments):
        pass

    def run(self, *arguments):
        pass

    def __getitem__(self, grid):
        return self.run


def pages(tokens):
    return torch.zeros(1, -(-tokens // 16), dtype=torch.int32)


def packed(tokens):
    options = {"fields": (0, 32, 0, 4, 0, 32, 4, 4, 32, 32, 0, 8), "rank": 64, "exact": zeros(1, 4, 96)}
    rotation, scales = rotation_tables(10.0 ** -torch.arange(16.0), 4096), zeros(96, dtype=torch.float32)
    rows = zeros(1, tokens, 32, dtype=torch.int16)
    return mla_decode_packed(zeros(1, 1, 4, 96), rows, scales, scales.clone(), 0.1, rotation=rotation, **options)


def lowrank(tokens):
    rotation = rotation_tables(10.0 ** -torch.arange(16.0), tokens)
    return lowrank_decode(zeros(1, 1, 4, 32), zeros(1, tokens, 64), zeros(2, 32, 64), 0.1, rotation=rotation)


STEPS = {
    "mla_decode": (_mla_decode, lambda n: mla_decode(zeros(1, 1, 4, 96), zeros(1, n, 64), zeros(1, n, 32), 0.1)),
    "mla_decode with gains": (
        _mla_decode,
        lambda n: mla_decode(zeros(1, 1, 4, 96), zeros(1, n, 64), zeros(1, n, 32), 0.1, key_gain=zeros(1, n, 2)),
    ),
    "mla_decode in pages": (
        _mla_decode,
        lambda n: mla_decode(zeros(1, 1, 4, 96), zeros(99, 16, 64), zeros(99, 16, 32), 0.1, pages=pages(n)),
    ),
    "mla_decode_packed": (_mla_decode_packed, packed),
    "lowrank_decode": (_lowrank_decode, lowrank),
}


def grow(name, begin, tokens):
    """Plans and compilations of a text that grows by some tokens after its first step."""
    operation, step = STEPS[name]
    step(begin)
    before, kernels = set(operation._plans), len(compilations)
    for length in range(begin + 1, begin + tokens + 1):
        step(length)
    return {"plans": len(set(operation._plans) - before), "compilations": compilations[kernels:]}


def without_gpu():
    """Let operators launch kernels on CPU tensors, as on an H100."""
    assert not backend.interpreted()
    utils = SimpleNamespace(
        load_binary=lambda *arguments: (1, 1, 64, 0, 1024),
        get_device_properties=lambda device: {
            "max_shared_mem": 227 * 1024,
            "multiprocessor_count": 132,
            "warpSize": 32,
        },
    )
    driver.set_active(
        SimpleNamespace(
            utils=utils,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_active_torch_device=lambda: torch.device("cpu"),
        )
    )
    backend.interpreted = lambda: True


if __name__ == "__main__":
    without_gpu()
    triton.compiler.compile = Kernel
    with torch.no_grad():
        tokens, *begins = map(int, sys.argv[1:])
        json.dump({begin: {name: grow(name, begin, tokens) for name in STEPS} for begin in begins}, sys.stdout)
