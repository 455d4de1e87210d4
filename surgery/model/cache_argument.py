"""The argument by which transformers hands caches on: `past_key_values`, since 5.24 `cache`.

The forwards of this package call it `cache` and take either. Whoever calls a family's forward, or reads what it
returned, goes by `CACHE`: older versions let `cache` pass unread, and newer ones will stop taking the old name.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
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
"""Name of the cache in calls and outputs of this transformers."""


def rename_cache(call: dict[str, Any], name: str = CACHE) -> dict[str, Any]:
    """Gives the cache among keyword arguments a name, in place, whichever it has; returns them."""
    for other in CACHE_NAMES:
        if other != name and other in call:
            call[name] = call.pop(other)
    return call


def takes_cache(forward: Callable) -> Callable:
    """A forward whose `cache` may come by either name."""

    @functools.wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **rename_cache(kwargs, "cache"))

    return renamed


def cache_for(model: nn.Module, cache: Any) -> dict[str, Any]:
    """A cache as the keyword argument that a model takes it by: remote code may be older than transformers."""
    return {_name_of(type(model)): cache}


@functools.cache
def _name_of(model: type[nn.Module]) -> str:
    takes = signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in takes), CACHE)


def returned_cache(output: Any) -> Any:
    """The cache in what a model returned; None if there is none."""
    return next((getattr(output, name) for name in (CACHE, *CACHE_NAMES) if hasattr(output, name)), None)


__all__ = ["CACHE", "CACHE_NAMES", "cache_for", "rename_cache", "returned_cache", "takes_cache"]
