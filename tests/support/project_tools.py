"""The programs of tools/, which are no package, as modules."""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@functools.cache
def tool(name: str) -> ModuleType:
    """`tools/NAME.py`, which may import others as it does where it is run."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", TOOLS / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        spec.loader.exec_module(module)
    return module
