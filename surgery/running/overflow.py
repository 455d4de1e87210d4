"""Values of a running model that overflow, and the tensor of the checkpoint to blame."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.tensors import all_finite
from surgery.common.errors import SurgeryError

LARGEST = 1e19
"""Hidden states beyond this are lost: norms square them, and the square of 2e19 is no float32."""


def check_hidden(hidden: Tensor, reader: CheckpointReader, what: str) -> None:
    """Check hidden states that ``what`` names.

    Raises:
        SurgeryError: one is NaN, infinite or too large to be squared; the line names the tensor to blame.
    """
    if hidden.numel():
        check_sizes([size_of(hidden)], reader, what)


def size_of(hidden: Tensor) -> Tensor:
    """Return the largest absolute value of hidden states, NaN where one is, still on their device."""
    return torch.stack(hidden.aminmax()).abs().max()


def check_sizes(sizes: Sequence[Tensor], reader: CheckpointReader, what: str) -> None:
    """Check what `size_of` gave for several hidden states; the host waits for their device once."""
    if sizes and not float(torch.stack(list(sizes)).max()) <= LARGEST:  # nor is NaN
        raise overflow(reader, what)


def overflow(reader: CheckpointReader, what: str) -> SurgeryError:
    """Name the first tensor with NaN or infinity, else the one with the largest value; reads the whole checkpoint."""
    largest, culprit = 0.0, ""
    for name in reader.names():
        for piece in reader.chunks(name):
            if not piece.is_floating_point() or not piece.numel():
                continue
            if not all_finite(piece):
                return SurgeryError(f"{reader.source}: {name} holds NaN or infinity; download the checkpoint again")
            extreme = float(torch.stack(piece.float().aminmax()).abs().max())
            if extreme > largest:
                largest, culprit = extreme, name
    return SurgeryError(
        f"{reader.source}: {what} overflow, and its largest weight is {largest:.1e}, in {culprit}; "
        "check that tensor, or download the checkpoint again"
    )
