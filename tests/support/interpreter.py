"""Triton's interpreter without work that has no results; what kernels compute is the same."""

import inspect
from dataclasses import replace
from functools import cache

from triton import language
from triton.language.core import is_builtin
from triton.runtime import interpreter


def make_quick() -> None:
    """Leaves out what is computed for assertions of debugging only, and what is looked up at every launch anew.

    Sums are computed again in 64 bits, for an assertion that is made with `debug` only. Triton's functions are searched
    for in their modules before every launch; which there are does not change. And they are put in place again for every
    call of a function within a kernel, where they are still in place.
    """
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    patch = interpreter._patch_builtin

    def patch_known(package, builder, scope):
        for name, member in _builtins(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    put = interpreter._patch_lang

    def put_once(fn):
        modules = [value for value in fn.__globals__.values() if value is language or value is language.core]
        if modules and not any(is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return put(fn)

    interpreter._patch_lang = put_once if put.__module__ == interpreter.__name__ else put
    interpreter._patch_builtin = patch_known if patch.__module__ == interpreter.__name__ else patch


@cache
def _builtins(package) -> list[tuple[str, object]]:
    return [(name, member) for name, member in inspect.getmembers(package) if is_builtin(member)]
