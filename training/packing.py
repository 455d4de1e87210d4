"""Packing of documents, each ended by eos, into rows of one length with a bos, and the order of the rows."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from surgery.calibration.planted import Wording, in_code, plant
from surgery.common.errors import SurgeryError
from surgery.training.data import IGNORED, TrainingRow
from surgery.training.shuffling import shuffled
from surgery.training.token_file import TokenFile

HELD_OUT_SEED = 0
"""Seed of the choice of held-out documents. Not a setting: all runs must hold out the same documents."""

# Purposes of a permutation, which seed it in addition to the run's seed.
HELD_OUT_DOCUMENTS, DOCUMENT_ORDER, ROW_ORDER = range(3)


@dataclass(frozen=True)
class RowShape:
    """Layout of rows.

    Attributes:
        length: tokens T of a row.
        bos: token id before each row, or None.
    """

    length: int
    bos: int | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, length: int) -> RowShape:
        """Create the row shape for a tokenizer."""
        return cls(length, tokenizer.bos_token_id)

    @property
    def room(self) -> int:
        """Document tokens of a row: its length without bos."""
        return self.length - (self.bos is not None)

    def row(self, pieces: Sequence[Sequence[int]]) -> TrainingRow:
        """Build a row from documents, or pieces of documents, that together have `room` tokens."""
        tokens = [] if self.bos is None else [self.bos]
        # Index 0 has no predecessor. After a bos the first piece is predicted whole; later pieces follow another
        # document.
        firsts = {0}
        documents = [0] * len(tokens)
        for number, piece in enumerate(pieces):
            if number:
                firsts.add(len(tokens))
            tokens += piece
            documents += [number] * len(piece)
        ids = torch.tensor(tokens, dtype=torch.long)
        labels = ids.clone()
        labels[sorted(firsts)] = IGNORED
        return TrainingRow(ids, labels, torch.tensor(documents, dtype=torch.long))


@dataclass(frozen=True)
class Recalls:
    """Facts with questions, planted in a share of the rows: healing on plain text alone forgets to retrieve.

    The seed and a row's number determine the facts and their positions.
    """

    tokenizer: PreTrainedTokenizerBase
    share: float
    seed: int
    wording: Wording = in_code

    def planted(self, number: int, pieces: list[list[int]]) -> list[list[int]]:
        """Return the pieces of row `number`, joined to one document of equal length if facts are planted in it.

        One document, since a question must attend to the fact that it asks for.
        """
        if int((number + 1) * self.share) == int(number * self.share):
            return pieces
        tokens = [token for piece in pieces for token in piece]
        rng = random.Random(f"recalls {self.seed} {number}")  # a text seed gives equal numbers on every machine
        return [plant(tokens, self.tokenizer, rng, self.wording)]


class PackedSequences:
    """Packed rows of tokenized documents, reshuffled every epoch; see `Sequences`. An epoch has `rows` rows.

    `held_out` are rows of documents that are not trained on, equal for equal data and length, without planted facts.
    """

    def __init__(
        self,
        file: TokenFile,
        shape: RowShape,
        name: str,
        seed: int = 0,
        held_out: int = 0,
        recalls: Recalls | None = None,
    ) -> None:
        """Lay out documents, shuffled once. Raises SurgeryError: the source `name` has too little text."""
        self._file, self._shape, self._seed, self._recalls = file, shape, seed, recalls
        lengths = np.asarray(file.lengths)
        order = shuffled(len(file), HELD_OUT_SEED, HELD_OUT_DOCUMENTS)
        num_tokens = held_out * shape.room
        aside = int(np.searchsorted(np.cumsum(lengths[order]), num_tokens)) + 1 if held_out else 0
        indices = np.sort(order[aside:])
        self._layout = _Layout(indices[shuffled(len(indices), seed, DOCUMENT_ORDER)], lengths, shape)
        spare = _Layout(order[:aside], lengths, shape)
        self.rows = self._layout.rows
        if not self.rows or spare.rows < held_out:
            raise SurgeryError(
                f"{name} has too little text: {len(file)} documents of {int(lengths.sum())} tokens for"
                f" {held_out} held-out rows of {shape.length} tokens and one training row of other documents;"
                " add text, or lower length or held_out"
            )
        self.held_out = [shape.row(spare.pieces(file, row)) for row in range(held_out)]
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)
        planted = recalls and [recalls.share, recalls.seed]
        decided = {"shape": asdict(shape), "seed": seed, "held_out": held_out, "recall": planted}
        self.data_sha256 = digest({"documents": file.sha256, **decided})
        self._description = {
            "source": name,
            "documents": len(indices),
            "held_out_documents": aside,
            "held_out_rows": held_out,
            "tokens": int(lengths[indices].sum()),
            "rows": self.rows,
            "length": shape.length,
            "recall": recalls.share if recalls else 0.0,
        }

    def sequence(self, number: int) -> TrainingRow:
        epoch, row_index = divmod(number, self.rows)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, shuffled(self.rows, self._seed, ROW_ORDER, epoch)
        pieces = self._layout.pieces(self._file, int(self._permutation[row_index]))
        if self._recalls is not None:
            pieces = self._recalls.planted(number, pieces)
        return self._shape.row(pieces)

    def describe(self) -> dict[str, Any]:
        return dict(self._description)


class _Layout:
    """Concatenated documents, cut into `rows` rows."""

    def __init__(self, documents: np.ndarray, lengths: np.ndarray, shape: RowShape) -> None:
        """Lay out `documents` [n], indices into the file; `lengths` [D] are the tokens of all its documents."""
        self._documents = documents
        self._offsets = np.concatenate([[0], np.cumsum(lengths[documents])])
        self._room = shape.room
        self.rows = int(self._offsets[-1]) // shape.room

    def pieces(self, file: TokenFile, row: int) -> list[list[int]]:
        start, end = row * self._room, (row + 1) * self._room
        pieces = []
        for index in range(int(np.searchsorted(self._offsets, start, side="right")) - 1, len(self._documents)):
            first, last = int(self._offsets[index]), int(self._offsets[index + 1])
            if first >= end:
                break
            number = int(self._documents[index])
            pieces.append(file.document(number, max(start, first) - first, min(end, last) - first))
        return pieces


def digest(values: Mapping[str, Any]) -> str:
    """Compute the sha256 of JSON values, in hex."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
