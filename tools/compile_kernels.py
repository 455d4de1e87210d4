"""Compile the kernels at sizes of real models, without a GPU, and print spills, shared memory and registers.

    python tools/compile_kernels.py                          # all of tests/kernels/compile_*.py for sm_90
    python tools/compile_kernels.py mla_decode --capability 80

Uses the installed Triton. For another: ``pip install --no-deps --target DIR triton==3.6.0``, then ``PYTHONPATH=DIR``.
The exit code is 1 if a launch spills more registers, or takes more shared memory, than its tests allow.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Interpreted kernels cannot be compiled; Triton reads this when it is imported.
os.environ["TRITON_INTERPRET"] = "0"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "kernels")]


def cases(names: list[str]) -> Iterator[tuple[object, str]]:
    """Yield the entries of ``COMPILED`` in the kernel tests and the names of their launch functions, once each."""
    from kernel_examples import collect

    keys = set()
    for entry in collect("COMPILED"):
        case = getattr(entry, "values", (entry,))[0]
        if case.cases not in keys and (not names or any(name in case.cases for name in names)):
            keys.add(case.cases)
            yield case, case.cases


def main() -> int:
    """Compile the selected launches and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of tests/kernels/compile_*.py:function; all")
    parser.add_argument("--capability", type=int, default=90, choices=(80, 90))
    options = parser.parse_args()
    import triton
    from compilation import SHARED_LIMITS, compile_launch

    target, wrong = options.capability, 0
    print(f"Triton {triton.__version__}, sm_{target}; bytes of registers spilled, of stack and of shared memory")
    print(f"{'spilled':>7} {'stack':>5} {'shared':>7} {'registers':>9} {'warps':>5} {'products':9} launch")
    for case, name in cases(options.names):
        module, function = name.split(":")
        launches = getattr(importlib.import_module(module), function)
        arguments = (target,) if inspect.signature(launches).parameters else ()
        for launch_name, launch in launches(*arguments).items():
            facts = compile_launch(launch, target)
            over = facts.spill_bytes > case.spilled(launch_name, target)
            over = over or facts.shared_bytes > SHARED_LIMITS[target]
            wrong += over
            print(
                f"{facts.spill_bytes:7} {facts.stack_bytes:5} {facts.shared_bytes:7} {facts.registers:9} "
                f"{launch.warps:5} {'+'.join(sorted(facts.mma)) or '-':9} {function}: {launch_name}"
                f"{'  <- over what its tests allow' if over else ''}",
                flush=True,
            )
    print(f"{wrong} launches exceed the limits of their tests" if wrong else "no launch exceeds the limits of its test")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
