"""Training rows and batches: tokens, labels, and the document of every token.

`surgery.training.open_data.open_data` builds the sequences. They are numbered, and step s of global batch size b takes
sequences s·b to (s + 1)·b - 1, whatever the number of processes. This makes runs resumable and comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import BoolTensor, LongTensor
from torch.nn.functional import pad

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
    """Stacked rows of equal length; `collate` builds them on the CPU, so that nothing waits for a GPU.

    Attributes:
        tokens, labels: [B, T] int64; see `TrainingRow`.
        predicting: [N] int64 indices into the flattened [B T] of the positions whose next token has a label.
        position_ids: [B, T] int64, which restart with every document, as transformers' document masks need them; None
            if every row holds one document.
    """

    tokens: LongTensor
    labels: LongTensor
    predicting: LongTensor
    position_ids: LongTensor | None

    @property
    def predicted(self) -> int:
        """Number of predicted tokens: the denominator of the mean loss."""
        return len(self.predicting)

    @property
    def valid(self) -> BoolTensor:
        """Mask [B, T] of predicting positions."""
        return pad(self.labels[:, 1:] != IGNORED, (0, 1))

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        tensors = (self.tokens, self.labels, self.predicting, self.position_ids)
        return Batch(*(None if tensor is None else tensor.to(device) for tensor in tensors))


class Sequences(Protocol):
    """Endless source of rows of one length, numbered from 0; `data_sha256` hashes the rows and their order."""

    data_sha256: str

    def sequence(self, number: int) -> TrainingRow:
        """Return row `number`, independent of earlier calls."""

    def describe(self) -> dict[str, Any]:
        """Return JSON values for the log: sources, sizes, shares."""


def collate(rows: Sequence[TrainingRow]) -> Batch:
    """Stack rows to a batch."""
    tokens, labels, documents = (
        torch.stack([getattr(row, name) for row in rows]) for name in ("tokens", "labels", "documents")
    )
    predicting = pad(labels[:, 1:] != IGNORED, (0, 1)).flatten().nonzero().flatten()
    if not documents.any():
        return Batch(tokens, labels, predicting, None)
    index = torch.arange(documents.shape[1]).expand_as(documents)
    first = torch.zeros_like(index)
    first[:, 1:] = torch.where(documents[:, 1:] != documents[:, :-1], index[:, 1:], 0)
    return Batch(tokens, labels, predicting, index - first.cummax(dim=1).values)


def dealt(step: int, batch_size: int, rank: int = 0, ranks: int = 1) -> list[int]:
    """Return the numbers of the sequences that process `rank` of `ranks` takes in a step; `batch_size` is global."""
    return [number for number in range(step * batch_size, (step + 1) * batch_size) if number % ranks == rank]
