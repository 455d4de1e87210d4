"""Argument checks shared by all operations; each raises ValueError with a one-line message."""

from __future__ import annotations

import torch
from torch import Tensor


def check_heads(name: str, query_heads: int, kv_heads: int) -> None:
    """Check that the number of query heads is a multiple of the number of KV heads."""
    if not kv_heads or query_heads % kv_heads:
        raise ValueError(f"{name}: {query_heads} query heads do not follow {kv_heads} KV heads evenly")


def check_keys(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check the shapes of queries [·, ·, ·, d], keys [·, G, S, d] and values [·, G, S, v] against each other."""
    shapes = f"queries {list(query.shape)}, keys {list(key.shape)} and values {list(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"{name}: {shapes}: four dimensions of each are needed")
    if key.shape[:3] != value.shape[:3] or key.shape[-1] != query.shape[-1]:
        raise ValueError(f"{name}: {shapes} do not belong together")


def check_dtypes(name: str, **tensors: Tensor) -> None:
    """Check that all tensors have the same dtype."""
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        dtypes = ", ".join(f"{what} is {tensor.dtype}" for what, tensor in tensors.items())
        raise ValueError(f"{name}: {dtypes}: one dtype is needed")


def check_counts(name: str, size: int, **counts: Tensor | None) -> None:
    """Check that each count is None or int32 [size]."""
    for what, count in counts.items():
        if count is not None and (count.shape != (size,) or count.dtype != torch.int32):
            raise ValueError(f"{name}: {what} is {count.dtype} {list(count.shape)}, int32 [{size}] is needed")


def check_pages(name: str, rows: int, pages: Tensor | None) -> None:
    """Check that the page table is None or int32 [rows, n]."""
    if pages is not None and (pages.dim() != 2 or pages.shape[0] != rows or pages.dtype != torch.int32):
        raise ValueError(f"{name}: pages is {pages.dtype} {list(pages.shape)}, int32 [{rows}, n] is needed")


def check_positive(name: str, **numbers: int | None) -> None:
    """Check that each number is None or at least 1."""
    for what, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name}: {what} of {number}: at least 1 is needed")


def too_wide(query: Tensor, value: Tensor, max_width: int = 256) -> str | None:
    """Return the reason if heads are wider than the tile of a kernel that holds whole heads, or None if they fit."""
    widest = max(query.shape[-1], value.shape[-1])
    return f"heads of {widest} numbers, at most {max_width}" if widest > max_width else None
