"""Results that all layers need of one step, such as masks: worked out by the first layer that asks.

They are kept on a tensor that the layers of a step share (the decoder's mask, the padding of the rows), and go with it.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

_MEMO = "_surgery_step"


def once(shared: Tensor, key: Hashable, make: Callable[[], Result], step: Hashable = None) -> Result:
    """Return what `make()` gives, made once for each `key` as long as `step` and the values of `shared` stay."""
    # Tensors of inference mode do not tell when they were written to.
    if torch.compiler.is_compiling() or shared.is_inference():
        return make()
    step = step, shared._version
    memo = getattr(shared, _MEMO, None)
    if memo is None or memo[0] != step:
        memo = step, {}
        setattr(shared, _MEMO, memo)
    results = memo[1]
    if key not in results:
        results[key] = make()
    return results[key]
