"""Conditions under which an attention call runs on decode kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surgery.kernels import cpu
from surgery.kernels.backend import refusal

MOST_QUERIES = 16
"""Maximum new tokens per row of a decode step, speculative decoding included. Longer prompts are bound by compute, and
absorbed or rebuilt heads take more of it than expanded ones."""


def is_step(module: nn.Module, query: Tensor, queries: int, operation: str) -> bool:
    """Return whether a kernel of `operation` runs `queries` new tokens: few, no gradients or dropout, on its device."""
    if queries > MOST_QUERIES or (torch.is_grad_enabled() and query.requires_grad):
        return False
    if module.training and getattr(module, "attention_dropout", 0.0):
        return False
    return cpu.runs(operation, query) or refusal(query) is None


def readable(query: Tensor, *modules: nn.Module | None) -> bool:
    """Return whether kernels may read the weights of modules directly: not offloaded, not wrapped by an adapter."""
    return all(
        "base_layer" not in module._modules
        and all(weight is None or weight.device == query.device for weight in module._parameters.values())
        for module in modules
        if module is not None
    )
