"""Name of the cache argument in transformers: `past_key_values`, since 5.24 `cache`.

Forward methods of this package name it `cache` and accept both. Calls of a family's forward, and reads of its output,
use `CACHE`: older versions ignore `cache` silently, and newer ones will drop the old name.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

import functools
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Any

from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE_NAMES = ("cache", "past_key_values")

CACHE = next(name for name in CACHE_NAMES if name in {field.name for field in fields(BaseModelOutputWithPast)})
"""Name of the cache argument and output field in the installed transformers."""


def rename_cache(call: dict[str, Any], name: str = CACHE) -> dict[str, Any]:
    """Rename the cache argument in `call` to `name`, in place; return `call`."""
    for other in CACHE_NAMES:
        if other != name and other in call:
            call[name] = call.pop(other)
    return call


def takes_cache(forward: Callable) -> Callable:
    """Decorate a forward method to accept its `cache` argument under either name."""

    @functools.wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **rename_cache(kwargs, "cache"))

    return renamed


def cache_for(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Return `cache` as a keyword argument, by the name in the model's signature: remote code may use an older one."""
    return {_name_of(type(model)): cache}


@functools.cache
def _name_of(model: type[nn.Module]) -> str:
    takes = signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in takes), CACHE)


def returned_cache(output: Any) -> Any:
    """Return the cache of a model's output; None if there is none."""
    return next((getattr(output, name) for name in (CACHE, *CACHE_NAMES) if hasattr(output, name)), None)
