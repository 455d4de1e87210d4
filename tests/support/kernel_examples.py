"""Examples of every operation of `kernels/` for the tests that all of them pass.

A test file of an operation has `EXAMPLES`, calls by name, and `COMPILED`, which launches of real sizes are looked at;
both are found here, so that a new operation's tests are one file.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

TESTS = Path(__file__).resolve().parents[1] / "kernels"

MADE = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=MADE, dtype=torch.float64)


def ints(*numbers: int | list[int], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


LEAVES = {"query", "key", "value", "full_key", "full_value", "streaming_key", "streaming_value", "latent", "rope_key"}
LEAVES |= {"key_gain", "key_up", "exact_key", "exact_value"}


@dataclass(frozen=True)
class Example:
    """A call of an operation in float64.

    Attributes:
        given: arguments by name, of the function, the registered operator and the reference alike.
        of_function, of_operator: those that only the one or the others have.
        settings: those of the operator that the reference has no use for.
        refused: changes of the function's arguments, and what is said of them.
    """

    function: Callable
    operator: Callable
    reference: Callable
    given: dict
    refused: list[tuple[dict, str]]
    of_function: dict = field(default_factory=dict)
    of_operator: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)

    def arguments(self, dtype: torch.dtype, device: torch.device, gradients: bool = False) -> dict:
        """Return the arguments of operator and reference; with gradients, all floating-point tensors but scales and
        tables have one."""
        results = {}
        for name, value in (self.given | self.of_operator).items():
            if isinstance(value, Tensor):
                value = value.to(device, dtype if value.is_floating_point() else None, copy=True)
                value.requires_grad_(gradients and value.is_floating_point() and name in LEAVES)
            results[name] = value
        return results


@dataclass(frozen=True)
class Compiled:
    """Launches of real sizes, and what the compiler may make of them.

    Attributes:
        cases: "module:function" in the folders of tests; the function returns launches by name, on the meta device,
            and may want the capability.
        mma: whether the kinds of matrix instructions are right, of a launch's name, a capability and the kinds.
        capabilities: 80 and 90.
        spilled: bytes of registers that may be, of a launch's name and a capability.
        frames: whether a frame on the stack is no spill that counts.
    """

    cases: str
    mma: Callable[[str, int, list[str]], bool]
    capabilities: tuple[int, ...] = (80, 90)
    spilled: Callable[[str, int], float] = lambda name, capability: 0
    frames: bool = False

    def __str__(self) -> str:
        return f"{self.cases}-{self.capabilities}"


def slow(case: Any) -> Any:
    """An entry of `COMPILED` that the default run leaves out."""
    return pytest.param(case, marks=pytest.mark.slow)


def collect(name: str) -> list[Any]:
    """`EXAMPLES` or `COMPILED` of all test files here that have it."""
    every = []
    for file in sorted(TESTS.glob("test_*.py")):
        if f"\n{name} = " not in file.read_text(encoding="utf-8"):
            continue
        MADE.manual_seed(0)
        spec = importlib.util.spec_from_file_location(f"found_{file.stem}", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        every += getattr(module, name).items() if name == "EXAMPLES" else getattr(module, name)
    return every
