"""Detection of overflow in a running model, and of the responsible tensor in the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.tensors import all_finite
from surgery.common.errors import SurgeryError

LARGEST = 1e19
"""Limit for hidden states: norms square them, and the square of 2e19 overflows float32."""


def check_hidden(hidden: Tensor, reader: CheckpointReader, what: str) -> None:
    """Check hidden states for overflow; ``what`` describes them in the error.

    Raises SurgeryError: a value is NaN, infinite or too large to be squared; names the responsible tensor.
    """
    if hidden.numel():
        check_sizes([size_of(hidden)], reader, what)


def size_of(hidden: Tensor) -> Tensor:
    """Return the largest absolute value of hidden states, or NaN, as a scalar on their device."""
    return torch.stack(hidden.aminmax()).abs().max()


def check_sizes(sizes: Sequence[Tensor], reader: CheckpointReader, what: str) -> None:
    """Check the results of `size_of` for several hidden states with a single device synchronization."""
    if sizes and not float(torch.stack(list(sizes)).max()) <= LARGEST:  # also catches NaN
        raise overflow(reader, what)


def overflow(reader: CheckpointReader, what: str) -> SurgeryError:
    """Build an error that names the first tensor with NaN or infinity, else that with the largest absolute value.

    Reads the whole checkpoint.
    """
    largest, culprit = 0.0, ""
    for name in reader.names():
        for piece in reader.chunks(name):
            if not piece.is_floating_point() or not piece.numel():
                continue
            if not all_finite(piece):
                return SurgeryError(f"{reader.source}: {name} contains NaN or infinity; download the checkpoint again")
            extreme = float(torch.stack(piece.float().aminmax()).abs().max())
            if extreme > largest:
                largest, culprit = extreme, name
    return SurgeryError(
        f"{reader.source}: {what} overflow; the largest weight, {largest:.1e}, is in {culprit}: "
        "check that tensor, or download the checkpoint again"
    )
