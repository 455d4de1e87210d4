"""Facts of a batch's documents that the host knows, passed to transformers before it asks the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import LongTensor, Tensor
from transformers import masking_utils

ASKS = "find_packed_sequence_indices"
"""The function of `transformers.masking_utils` that looks, once a forward pass, whether positions start again."""


@contextmanager
def known_documents(packed: bool | None) -> Iterator[None]:
    """Have masks made in a ``with`` block without a look at the positions, for which the host would wait.

    Args:
        packed: whether positions start again within a row; None has transformers look.
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
