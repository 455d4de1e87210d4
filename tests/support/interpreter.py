"""Triton's interpreter without work that has no results; what kernels compute is the same."""

import inspect
from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType

import triton.language
from triton.language.core import is_builtin
from triton.runtime import interpreter


def make_quick() -> None:
    """Two thirds of the interpreter's time, in launches as small as those of tests."""
    # Sums are computed again in 64 bits for an assertion that is made with `debug` only.
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    interpreter._patch_builtin, interpreter._patch_lang = _patch_builtin, _patch_lang


def _patch_lang(function: FunctionType) -> interpreter._LangPatchScope:
    """The language as a kernel needs it has all that the functions need that it calls."""
    if not any(is_builtin(language.load) for language in _languages(function)):
        return interpreter._LangPatchScope()
    return _patch(function)


_patch = interpreter._patch_lang


@cache
def _languages(function: FunctionType) -> tuple[ModuleType, ...]:
    return tuple(each for each in (triton.language, triton.language.core) if each in function.__globals__.values())


@cache
def _builtins(package: ModuleType | type) -> tuple[str, ...]:
    """Names that are looked for anew in every call of a jitted function."""
    return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))


def _patch_builtin(package, builder, scope) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)
