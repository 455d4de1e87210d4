"""Argument checks shared by all operations; each raises ValueError with a one-line message."""

from __future__ import annotations

import torch
from torch import Tensor


def check_counts(name: str, size: int, **counts: Tensor | None) -> None:
    """Check that each count is None or int32 [size]."""
    for what, count in counts.items():
        if count is not None and (count.shape != (size,) or count.dtype != torch.int32):
            raise ValueError(f"{name}: {what} must be int32 [{size}], not {count.dtype} {list(count.shape)}")


def check_pages(name: str, rows: int, pages: Tensor | None) -> None:
    """Check that the page table is None or int32 [rows, n]."""
    if pages is not None and (pages.dim() != 2 or pages.shape[0] != rows or pages.dtype != torch.int32):
        raise ValueError(f"{name}: pages must be int32 [{rows}, n], not {pages.dtype} {list(pages.shape)}")
