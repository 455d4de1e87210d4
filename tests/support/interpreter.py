"""Triton's interpreter without work that has no results; what kernels compute is the same."""

import inspect
from dataclasses import replace
from functools import cache

from triton import language
from triton.language.core import block_type, is_builtin, tensor
from triton.runtime import interpreter


def make_quick() -> None:
    """Leaves out what is computed for assertions of debugging only, and what is looked up again at every launch.

    Sums are computed again in 64 bits, for an assertion that is made with `debug` only. Triton's functions are searched
    for in their modules before every launch; which there are does not change. And they are put in place again for every
    call of a function within a kernel, where they are still in place. Every tensor makes objects of its shape, and
    every operation a table of dtypes: those of one shape and one dtype are equal.
    """
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)

    def patch_known(package, builder, scope):
        for name, member in _builtins(package):
            scope.set_attr(package, name, _interpreted(member))

    put = interpreter._patch_lang

    def put_once(fn):
        modules = _language_of(fn)
        if modules and not any(is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return put(fn)

    if put.__module__ != interpreter.__name__:
        return  # it is quick already
    interpreter._patch_lang, interpreter._patch_builtin = put_once, patch_known
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    _share_shapes()


@cache
def _language_of(fn) -> list:
    return [value for value in fn.__globals__.values() if value is language or value is language.core]


@cache
def _builtins(package) -> list[tuple[str, object]]:
    return [(name, member) for name, member in inspect.getmembers(package) if is_builtin(member)]


@cache
def _interpreted(member):
    """A function of Triton's that is told by what it is computed."""

    def call(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    return call


def _by_name(function):
    """A function of a dtype, computed once for each name."""
    results = {}

    def call(dtype):
        if dtype.name not in results:
            results[dtype.name] = function(dtype)
        return results[dtype.name]

    return call


def _share_shapes() -> None:
    """Have tensors, and types of blocks, take what is of their shape alone from the first of that shape."""
    init_block, init_tensor, blocks, tensors = block_type.__init__, tensor.__init__, {}, {}

    def as_first_block(self, element_ty, shape):
        key = element_ty.name, *shape
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key], element_ty=element_ty)

    def as_first_tensor(self, handle, type):
        if type.name not in tensors:
            init_tensor(self, handle, type)
            tensors[type.name] = vars(self).copy()
        vars(self).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)

    block_type.__init__, tensor.__init__ = as_first_block, as_first_tensor
