"""Rows of a dataset that is read while training: nothing is tokenised before, nothing kept on the disk.

The rows come in the dataset's own order, which should be a shuffled one. Every process reads and packs all of it and
takes its own rows, so that global batches do not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedTokenizerBase

from surgery.calibration.text import dataset_errors, open_dataset
from surgery.common.errors import SurgeryError
from surgery.training.chat import ChatEncoder, without_nulls
from surgery.training.data import Row
from surgery.training.packing import Recalls, RowShape, digest
from surgery.training.sources import Note, TextSource, encode_texts
from surgery.training.token_file import Document

Encode = Callable[[dict[str, Any], str], Document | None]


class StreamedSequences:
    """Rows of a streamed dataset, in rising order only; at its end it begins anew. See `Sequences`.

    Attributes:
        held_out: rows of its first documents, which no other row has.
    """

    def __init__(
        self,
        source: TextSource,
        tokenizer: PreTrainedTokenizerBase,
        shape: RowShape,
        held_out: int = 0,
        recalls: Recalls | None = None,
        note: Note = lambda text: None,
    ) -> None:
        """Reads the held-out rows.

        Raises:
            SurgeryError: the dataset cannot be read, has another field or too few documents for them.
        """
        self._source, self._shape, self._recalls = source, shape, recalls
        self._encode = _chat_encoder(tokenizer, note) if source.is_chat else _text_encoder(source, tokenizer)
        self._next, self._epoch, self._read = 0, 0, 0
        self._waiting: list[Document] = []
        self._held_out_documents = 0
        self._begin()
        self.held_out = [shape.row(self._pop()) for _ in range(held_out)]
        if self._epoch:
            raise SurgeryError(f"{source.source} has too little text for {held_out} held-out rows of {shape.length}")
        # What is left of the last document would be in both.
        self._held_out_documents, self._waiting = self._read, []
        planted = recalls and [recalls.share, recalls.seed]
        decided = {"shape": asdict(shape), "held_out": held_out, "recall": planted}
        self.data_sha256 = digest({"stream": asdict(source), "encoding": source.identity(tokenizer), **decided})

    def sequence(self, number: int) -> Row:
        """Raises SurgeryError: the row has passed, or no document is left to make it of."""
        if number < self._next:
            raise SurgeryError(
                f"{self._source.source}: a stream gives its rows once; row {number} was asked for after row"
                f" {self._next - 1}"
            )
        for _ in range(number - self._next):  # rows of other processes
            self._pop()
        pieces = self._pop()
        self._next = number + 1
        if self._recalls is not None:
            pieces = self._recalls.planted(number, pieces, keep_first=False)
        return self._shape.row(pieces)

    def state(self) -> dict[str, Any]:
        return {
            "next": self._next,
            "epoch": self._epoch,
            "read": self._read,
            "waiting": [[document.tokens, document.labelled] for document in self._waiting],
            "dataset": self._dataset.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        if set(state) != {"next", "epoch", "read", "waiting", "dataset"}:
            raise SurgeryError(
                f"{self._source.source}: the saved place in the data is not that of a stream; resume with its data"
            )
        self._begin(state["dataset"])
        self._next, self._epoch, self._read = state["next"], state["epoch"], state["read"]
        self._waiting = [Document(*document) for document in state["waiting"]]

    def describe(self) -> dict[str, Any]:
        return {
            "source": self._source.source,
            "stream": True,
            "held_out_rows": len(self.held_out),
            "held_out_documents": self._held_out_documents,
            "length": self._shape.length,
            "recall": self._recalls.share if self._recalls else 0.0,
        }

    def _begin(self, state: dict[str, Any] | None = None) -> None:
        """Opens the dataset, anew for every epoch: one that was told where to begin begins there every time."""
        self._dataset = open_dataset(self._source.source)
        if state is not None:
            self._dataset.load_state_dict(state)
        self._records = iter(self._dataset)

    def _pop(self) -> list[Document]:
        """The pieces of the next row."""
        room, have = self._shape.room, sum(len(document.tokens) for document in self._waiting)
        while have < room:
            document = self._document()
            self._waiting.append(document)
            have += len(document.tokens)
        if have == room:
            pieces, self._waiting = self._waiting, []
            return pieces
        *pieces, last = self._waiting
        kept = len(last.tokens) - (have - room)
        if self._shape.whole:
            # Alone and too long: it loses its end; otherwise the row ends before it.
            self._waiting = [last] if pieces else []
            return pieces or [_part(last, 0, room)]
        self._waiting = [_part(last, kept, None)]
        return [*pieces, _part(last, 0, kept)]

    def _document(self) -> Document:
        """The next document to train on, of the next epoch where there is no more."""
        for document in self._rest_of_epoch():
            return document
        self._epoch += 1
        self._read = 0
        self._begin()
        for document in self._rest_of_epoch():
            return document
        raise SurgeryError(f"{self._source.source} has no documents to train on; give more, or fewer held-out rows")

    def _rest_of_epoch(self) -> Iterator[Document]:
        while True:
            with dataset_errors(self._source.source):
                record = next(self._records, None)
            if record is None:
                return
            self._read += 1
            if self._read <= self._held_out_documents:
                continue
            document = self._encode(record, f"dataset {self._source.source}, row {self._read - 1}")
            if document is not None:
                yield document


def _chat_encoder(tokenizer: PreTrainedTokenizerBase, note: Note) -> Encode:
    encode = ChatEncoder(tokenizer, note)
    return lambda record, where: encode(without_nulls(record), where)


def _text_encoder(source: TextSource, tokenizer: PreTrainedTokenizerBase) -> Encode:
    def encode(record: dict[str, Any], where: str) -> Document | None:
        text = record.get(source.text_field, 0)
        if text is not None and not isinstance(text, str):
            raise SurgeryError(
                f"{where} has no text in {source.text_field!r}, of {', '.join(record)}: name the field with the text"
            )
        return next(encode_texts(iter([text]), tokenizer)) if text and text.strip() else None

    return encode


def _part(document: Document, start: int, end: int | None) -> Document:
    """Tokens `start` to `end` of a document."""
    labelled = document.labelled
    return Document(document.tokens[start:end], labelled if labelled is None else labelled[start:end])
