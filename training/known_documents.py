"""Patch of transformers' packed-sequence detection, which would wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import LongTensor, Tensor
from transformers import masking_utils

ASKS = "find_packed_sequence_indices"
"""Function of `transformers.masking_utils` that checks, once a forward pass, whether position ids restart."""


@contextmanager
def known_documents(packed: bool | None) -> Iterator[None]:
    """Build masks in a ``with`` block without reading position ids on the host, which would synchronize the device.

    Args:
        packed: whether position ids restart within a row; None leaves the check to transformers.
    """
    asks = getattr(masking_utils, ASKS, None)
    if packed is None or asks is None:
        yield
        return

    def answer(position_ids: LongTensor) -> Tensor | None:
        if not packed:
            return None
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)

    setattr(masking_utils, ASKS, answer)
    try:
        yield
    finally:
        setattr(masking_utils, ASKS, asks)
