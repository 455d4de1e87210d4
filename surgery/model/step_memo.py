"""Memo of results that all layers of one step share, such as masks: the first layer computes them.

Results are an attribute of a tensor that the layers share (the decoder's mask, the padding) and are freed with it.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

_MEMO = "_surgery_step"


def once(shared: Tensor, key: Hashable, make: Callable[[], Result], step: Hashable = None) -> Result:
    """Return the result of `make()`, cached by `key` until `step` or the values of `shared` change."""
    # Inference-mode tensors have no version counter.
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
