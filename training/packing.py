"""Rows of one length out of documents of any: which tokens stand in a row, and in which order the rows come.

Documents are one long stream, each text ended by eos, that is cut into rows, a bos before each, as calibration does it.
"""

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
"""Decides which documents are held out. No setting: a run with another seed must not train on what a first held out."""

# What a permutation is for, besides the run's seed.
HELD_OUT_DOCUMENTS, DOCUMENT_ORDER, ROW_ORDER = range(3)


@dataclass(frozen=True)
class RowShape:
    """Layout of rows.

    Attributes:
        length: tokens T of a row.
        bos: put before each row; None for none.
    """

    length: int
    bos: int | None

    def __post_init__(self) -> None:
        if self.length < 2:
            raise SurgeryError(f"rows of {self.length} tokens: at least 2 are needed")

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, length: int) -> RowShape:
        """The shape for a tokenizer."""
        return cls(length, tokenizer.bos_token_id)

    @property
    def room(self) -> int:
        """Tokens of documents that a row holds."""
        return self.length - (self.bos is not None)

    def row(self, pieces: Sequence[Sequence[int]]) -> TrainingRow:
        """The row of documents, or parts of such, that together have `room` tokens."""
        tokens = [] if self.bos is None else [self.bos]
        # After a bos the first piece's first token can be predicted; of the others it follows another document.
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
    """Plants facts in a share of the rows and asks for them again: healing on plain text alone forgets to retrieve.

    Attributes:
        tokenizer: of the lines planted.
        share: of the rows, 0 to 1, spread evenly.
        seed: with a row's number it decides what is planted and where.
        wording: of the lines, as they stand in the text.
    """

    tokenizer: PreTrainedTokenizerBase
    share: float
    seed: int
    wording: Wording = in_code

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise SurgeryError(f"share of sequences with planted recalls {self.share}: it must lie between 0 and 1")

    def planted(self, number: int, pieces: list[list[int]]) -> list[list[int]]:
        """The pieces of row `number`, or, if facts are planted in it, one document in their place, of equal length.

        One document, because a question must see the fact that it asks for.
        """
        if int((number + 1) * self.share) == int(number * self.share):
            return pieces
        tokens = [token for piece in pieces for token in piece]
        rng = random.Random(f"recalls {self.seed} {number}")  # a text as seed is hashed alike everywhere
        return [plant(tokens, self.tokenizer, rng, self.wording)]


class PackedSequences:
    """Rows of tokenized documents: any number of them, every epoch in another order. See `Sequences`.

    Attributes:
        held_out: rows of documents that no other row has, always the same for equal data and length, without planted
            facts.
        rows: rows of an epoch.
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
        """
        Args:
            file: documents, in any order: they are shuffled once before they are packed, and the rows every epoch.
            name: of the source, for errors and the log.
            held_out: number of held-out rows.

        Raises:
            SurgeryError: there is too little text.
        """
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
                f" {held_out} held-out rows of {shape.length} and at least one, of other documents, to train on; give"
                " more text, shorter rows or fewer held-out ones"
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
        epoch, place = divmod(number, self.rows)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, shuffled(self.rows, self._seed, ROW_ORDER, epoch)
        pieces = self._layout.pieces(self._file, int(self._permutation[place]))
        if self._recalls is not None:
            pieces = self._recalls.planted(number, pieces)
        return self._shape.row(pieces)

    def describe(self) -> dict[str, Any]:
        return dict(self._description)


class _Layout:
    """Documents one after the other, and the spans of their tokens that are rows.

    Attributes:
        rows: number of them.
    """

    def __init__(self, documents: np.ndarray, lengths: np.ndarray, shape: RowShape) -> None:
        """`documents` [n]: their numbers, in order; `lengths` [D]: tokens of every document of the file."""
        self._documents = documents
        self._offsets = np.concatenate([[0], np.cumsum(lengths[documents])])
        self._room = shape.room
        self.rows = int(self._offsets[-1]) // shape.room

    def pieces(self, file: TokenFile, row: int) -> list[list[int]]:
        """Return the pieces of documents in a row, in order."""
        start, end = row * self._room, (row + 1) * self._room
        pieces = []
        for place in range(int(np.searchsorted(self._offsets, start, side="right")) - 1, len(self._documents)):
            first, last = int(self._offsets[place]), int(self._offsets[place + 1])
            if first >= end:
                break
            number = int(self._documents[place])
            pieces.append(file.document(number, max(start, first) - first, min(end, last) - first))
        return pieces


def digest(values: Mapping[str, Any]) -> str:
    """sha256, in hex, of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
