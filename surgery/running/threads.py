"""Number of intra-op threads of torch on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads in the block, and restore it afterwards.

    This also affects operators in other Python threads meanwhile, which changes their last digits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
