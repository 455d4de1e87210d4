"""Training rows and batches: tokens, labels, and the document of every token.

`surgery.training.open_data.open_data` builds the sequences. They are numbered, and step s of global batch size b takes
sequences s·b to (s + 1)·b - 1, whatever the number of processes. This makes runs resumable and comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import LongTensor, Tensor

from surgery.common.errors import SurgeryError

IGNORED = -100
"""Label of a token without a loss, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True)
class TrainingRow:
    """One packed sequence.

    Attributes:
        tokens: [T] int64 ids.
        labels: [T] int64, not shifted: labels[t] is tokens[t], or `IGNORED` if token t is not predicted. The first
            token of a document is not, since the token before it belongs to another document.
        documents: [T] int64 index of the token's document in the row, from 0.
    """

    tokens: LongTensor
    labels: LongTensor
    documents: LongTensor


@dataclass(frozen=True)
class Batch:
    """Stacked rows of equal length: tokens, labels and documents [B, T] int64; see `TrainingRow`.

    Derived, and kept by `to` so that nothing waits for a GPU: `predicting`, [N] int64 indices into the flattened [B T]
    of positions whose next token has a label, and `spans`, the token slices of each document of each row.
    """

    tokens: LongTensor
    labels: LongTensor
    documents: LongTensor
    predicting: LongTensor | None = None
    spans: tuple[tuple[slice, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.predicting is None:
            rows, columns = (self.labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
            object.__setattr__(self, "predicting", rows * self.labels.shape[1] + columns)
        if self.spans is None:
            object.__setattr__(self, "spans", tuple(map(_spans, self.documents.tolist())))

    @property
    def packed(self) -> bool:
        """Return whether a row holds several documents."""
        return holds_several(self.spans)

    @property
    def position_ids(self) -> LongTensor:
        """Position ids [B, T] int64 that restart with every document, as transformers' document masks need them."""
        index = torch.arange(self.documents.shape[1], device=self.documents.device).expand_as(self.documents)
        first = torch.zeros_like(index)
        first[:, 1:] = torch.where(self.documents[:, 1:] != self.documents[:, :-1], index[:, 1:], 0)
        return index - first.cummax(dim=1).values

    @property
    def predicted(self) -> int:
        """Number of predicted tokens: the denominator of the mean loss."""
        return len(self.predicting)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        tensors = (self.tokens, self.labels, self.documents, self.predicting)
        return Batch(*(moved(tensor, torch.device(device)) for tensor in tensors), self.spans)


def holds_several(spans: Sequence[Sequence[slice]]) -> bool:
    """Return whether any row has several documents."""
    return any(len(row) > 1 for row in spans)


def _spans(documents: list[int]) -> tuple[slice, ...]:
    starts = [0, *(at for at in range(1, len(documents)) if documents[at] != documents[at - 1])]
    return tuple(slice(*span) for span in zip(starts, [*starts[1:], len(documents)], strict=True))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; copies from CPU to CUDA are asynchronous, from pinned memory."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Sequences(Protocol):
    """Endless source of rows of one length, numbered from 0; `data_sha256` hashes the rows and their order."""

    data_sha256: str

    def sequence(self, number: int) -> TrainingRow:
        """Return row `number`, independent of earlier calls."""

    def describe(self) -> dict[str, Any]:
        """Return JSON values for the log: sources, sizes, shares."""


def collate(rows: Sequence[TrainingRow]) -> Batch:
    """Stack rows to a batch. Raises SurgeryError: there are no rows, or their lengths differ."""
    lengths = sorted({len(row.tokens) for row in rows})
    if len(lengths) != 1:
        raise SurgeryError(
            f"cannot stack {len(rows)} rows of lengths {lengths}: all rows of a batch need the same length"
        )
    return Batch(
        torch.stack([row.tokens for row in rows]),
        torch.stack([row.labels for row in rows]),
        torch.stack([row.documents for row in rows]),
    )


def dealt(step: int, batch_size: int, rank: int = 0, ranks: int = 1) -> list[int]:
    """Return the numbers of the sequences that process `rank` of `ranks` takes in a step; `batch_size` is global.

    Raises SurgeryError: the batch is smaller than the number of processes, or the rank is out of range.
    """
    if batch_size < ranks or not 0 <= rank < ranks:
        raise SurgeryError(
            f"cannot split a batch of {batch_size} sequences for rank {rank} of {ranks}: use at least one per process"
        )
    return [number for number in range(step * batch_size, (step + 1) * batch_size) if number % ranks == rank]
