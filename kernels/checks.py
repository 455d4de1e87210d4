"""Argument checks shared by all operations; each raises ValueError with a one-line message."""

from __future__ import annotations

import torch
from torch import Tensor


def check_heads(name: str, query_heads: int, kv_heads: int) -> None:
    """Check that the number of query heads is a multiple of the number of KV heads."""
    if not kv_heads or query_heads % kv_heads:
        raise ValueError(f"{name}: {query_heads} query heads must be a multiple of {kv_heads} KV heads")


def check_keys(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check the shapes of queries [·, ·, ·, d], keys [·, G, S, d] and values [·, G, S, v] against each other."""
    shapes = f"queries {list(query.shape)}, keys {list(key.shape)} and values {list(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"{name}: {shapes}: must have 4 dimensions each")
    if key.shape[:3] != value.shape[:3] or key.shape[-1] != query.shape[-1]:
        raise ValueError(f"{name}: {shapes}: must agree in d, and keys and values in rows, heads and tokens")


def check_dtypes(name: str, **tensors: Tensor) -> None:
    """Check that all tensors have the same dtype."""
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        dtypes = ", ".join(f"{what} is {tensor.dtype}" for what, tensor in tensors.items())
        raise ValueError(f"{name}: {dtypes}: must have the same dtype")


def check_counts(name: str, size: int, **counts: Tensor | None) -> None:
    """Check that each count is None or int32 [size]."""
    for what, count in counts.items():
        if count is not None and (count.shape != (size,) or count.dtype != torch.int32):
            raise ValueError(f"{name}: {what} must be int32 [{size}], not {count.dtype} {list(count.shape)}")


def check_pages(name: str, rows: int, pages: Tensor | None) -> None:
    """Check that the page table is None or int32 [rows, n]."""
    if pages is not None and (pages.dim() != 2 or pages.shape[0] != rows or pages.dtype != torch.int32):
        raise ValueError(f"{name}: pages must be int32 [{rows}, n], not {pages.dtype} {list(pages.shape)}")


def check_positive(name: str, **numbers: int | None) -> None:
    """Check that each number is None or at least 1."""
    for what, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name}: {what} must be at least 1, not {number}")


def too_wide(query: Tensor, value: Tensor) -> str | None:
    """Return the reason if heads are wider than the tile of a kernel that holds whole heads, or None if they fit."""
    widest = max(query.shape[-1], value.shape[-1])
    return f"head size {widest} exceeds 256" if widest > 256 else None
