"""Compiles a launch for a GPU that need not be there, and reads off what decides its speed.

Triton carries its own ptxas, so a CPU is enough. The facts are those of the launch's own shapes: divisibility by 16 of
pointers, strides and sizes is told to the compiler as it would be on the device.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from surgery.kernels.launch import Launch

SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one program may use, by compute capability (CUDA programming guide, table 28)."""

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Compiled:
    """Needs of a compiled program.

    Attributes:
        shared_bytes: of shared memory.
        stack_bytes, spill_bytes: of local memory, and what is stored to it because registers ran out.
        registers: of a thread.
        mma: kinds of matrix instructions: "wgmma" (Hopper's, of a warp group) and "mma" (of a warp).
        ptx: the program.
    """

    shared_bytes: int
    stack_bytes: int
    spill_bytes: int
    registers: int
    mma: frozenset[str]
    ptx: str


def compile_launch(launch: Launch, capability: int = 90) -> Compiled:
    """Compiles for sm_80 or sm_90. The launch's tensors may be on the meta device.

    Raises:
        RuntimeError: kernels are interpreted in this process, or the compiler refuses.
    """
    function = launch.kernel
    if not isinstance(function, triton.runtime.jit.JITFunction):
        raise RuntimeError("kernels are interpreted in this process: compile in one without TRITON_INTERPRET")
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(function.params):
        value = launch.arguments[parameter.name]
        kind = "constexpr" if parameter.is_constexpr or value is None else _type(value)
        if kind == "i32" and value == 1 and not parameter.do_not_specialize:
            kind = "constexpr"
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        elif parameter.do_not_specialize:
            continue
        elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = result.asm["ptx"]
    return Compiled(result.metadata.shared, *_assembled(ptx, capability), _matrix_instructions(ptx), ptx)


def _type(value: Tensor | bool | int | float) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _matrix_instructions(ptx: str) -> frozenset[str]:
    return frozenset(kind for kind in ("wgmma", "mma") if re.search(rf"^\s*{kind}\.\S*mma|^\s*{kind}\.sync", ptx, re.M))


def _assembled(ptx: str, capability: int) -> tuple[int, int, int]:
    """Bytes of stack, bytes spilled and registers, as ptxas says."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx, encoding="utf-8")
        name = f"sm_{capability}" + ("a" if capability == 90 else "")
        options = ["-v", f"--gpu-name={name}", "-o", str(Path(folder) / "kernel.cubin")]
        command = [get_ptxas(capability).path, *options, str(file)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"ptxas: {process.stderr.strip()}")
    match = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", process.stderr)
    registers = re.search(r"Used (\d+) registers", process.stderr)
    return int(match[1]), int(match[2]), int(registers[1])
