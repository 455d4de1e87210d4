"""Steps: the calls of an attention that decoding kernels take."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surgery.kernels.backend import refusal

MOST_QUERIES = 16
"""New tokens of a row up to which a call is decoding: a step, or a few tokens of speculative decoding. Longer prompts
are bound by operations, and absorbed or rebuilt heads do more of them than expanded ones."""


def is_step(module: nn.Module, query: Tensor, queries: int) -> bool:
    """Return whether kernels for decoding may take a call with so many new tokens: no gradients, no dropout, a GPU."""
    if queries > MOST_QUERIES or (torch.is_grad_enabled() and query.requires_grad):
        return False
    if module.training and getattr(module, "attention_dropout", 0.0):
        return False
    return refusal(query) is None


def readable(query: Tensor, *modules: nn.Module | None) -> bool:
    """Return whether kernels may read the weights of modules without calling them.

    Not those that are offloaded until a call, nor those inside an adapter.
    """
    return all(
        "base_layer" not in module._modules
        and all(weight is None or weight.device == query.device for weight in module._parameters.values())
        for module in modules
        if module is not None
    )
