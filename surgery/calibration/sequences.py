"""Calibration sequences: windows of real text in which facts are planted and asked for again.

Plain text hardly exercises the heads that retrieve, so a loss-weighted statistic gives their directions away; planted
recalls bring them back at almost no cost in loss.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import LongTensor, Tensor

from surgery.calibration.planted import Wording, in_code, plant
from surgery.calibration.settings import ConversionSettings
from surgery.calibration.text import iter_documents
from surgery.common.errors import SurgeryError
from surgery.eval.sequences import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CUT: dict[str, dict[str, list[int]]] = {}
"""Token ids by text, of the tokenizer that was last used, by its rules: a conversion reads its text with planted
recalls and, for what stands between them, without; and a process may make several conversions of a source."""

SPREAD = 16
"""Tokens of text read for every token drawn. More makes the windows more diverse, and takes longer."""


@dataclass(frozen=True)
class SequenceRequest:
    """Request for sequences of a text; equal requests give equal sequences, as long as the text is the same.

    Attributes:
        tokens: calibration tokens wanted; rounded up to whole sequences.
        length: tokens T of a sequence, bos included.
        recall: share of the sequences, 0 to 1, that carry planted facts; spread evenly, so that the first few
            sequences have the same share.
        seed: of where sequences are cut out of the text, and of the facts.
        held_out: number of held-out sequences M.
        text_field: as in `iter_documents`.

    Raises:
        SurgeryError: one is out of its range.
    """

    tokens: int = 24_576
    length: int = 1024
    recall: float = 1.0
    seed: int = 0
    held_out: int = 4
    text_field: str = "text"

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.length < 2:
            raise SurgeryError(
                f"{self.tokens} calibration tokens in sequences of {self.length}: ask for at least one token, "
                "in sequences of at least two"
            )
        if not 0 <= self.recall <= 1:
            raise SurgeryError(f"share of sequences with planted recalls {self.recall}: it must lie between 0 and 1")
        if self.held_out < 0:
            raise SurgeryError(f"{self.held_out} held-out sequences: 0 or more are possible")

    @classmethod
    def of(cls, settings: ConversionSettings, max_positions: int) -> SequenceRequest:
        """Return the sequences that a conversion needs, no longer than its model can read."""
        return cls(
            tokens=settings.calibration_tokens,
            length=min(settings.calibration_length, max_positions),
            recall=settings.recall,
            seed=settings.seed,
            held_out=settings.held_out,
            text_field=settings.text_field,
        )

    @property
    def count(self) -> int:
        """Calibration sequences N."""
        return -(-self.tokens // self.length)


@dataclass(frozen=True)
class CalibrationSet:
    """Texts on which statistics are taken, and those on which choices between their results are made.

    Attributes:
        tokens: [N, T] int64, the calibration sequences.
        held_out: [M, T] int64, of the same kind but from other documents; M may be 0.
        description: plain values for the report: source, sizes, seed, and a sha256 of each token tensor.
    """

    tokens: LongTensor
    held_out: LongTensor
    description: dict[str, Any]


@dataclass
class Pool:
    """A stream of tokens, its documents separated by eos, from which windows are drawn."""

    target: int
    ids: list[int] = field(default_factory=list)
    documents: int = 0

    @property
    def filled(self) -> float:
        """Share of the tokens that are wanted; more than 1 where there are more."""
        return len(self.ids) / self.target if self.target else 1.0

    def add(self, ids: list[int]) -> None:
        """Puts a document after the others."""
        self.ids += ids
        self.documents += 1


def build_calibration(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    request: SequenceRequest,
    *,
    bos: int | Literal["tokenizer"] | None = "tokenizer",
) -> CalibrationSet:
    """Builds calibration and held-out sequences from a text source.

    Documents are tokenized one by one, until there is enough, into two streams: each goes to the one that lacks more,
    so no document is in both. Windows are then drawn at random from the streams.

    Args:
        tokenizer: any Hugging Face tokenizer; its eos, if it has one, goes between documents.
        source: a text source as in `iter_documents`.
        bos: token put before every sequence: an id, None for none, or "tokenizer" for the tokenizer's own if any.

    Raises:
        SurgeryError: the source cannot be read or has too little text.
    """
    bos = tokenizer.bos_token_id if bos == "tokenizer" else bos
    count, length, seed, held_out = request.count, request.length, request.seed, request.held_out

    calibration, other = Pool(pool_size(count, length)), Pool(pool_size(held_out, length))
    fill(calibration, other, tokenized(tokenizer, iter_documents(source, seed=seed, text_field=request.text_field)))
    _check_pools(calibration, other, source)

    windows = Windows(length, request.recall, bos, tokenizer, random.Random(seed))
    drawn, drawn_held_out = windows.draw(calibration, count), windows.draw(other, held_out)
    description = {
        "source": source,
        "tokenizer": tokenizer.name_or_path,
        "seed": seed,
        "length": length,
        "sequences": count,
        "held_out_sequences": held_out,
        "tokens": drawn.numel(),
        "recall": request.recall,
        "documents": calibration.documents,
        "held_out_documents": other.documents,
        "held_out_source": "the same text, other documents",
        "text_tokens": len(calibration.ids),
        "sha256": token_hash(drawn),
        "held_out_sha256": token_hash(drawn_held_out),
    }
    return CalibrationSet(drawn, drawn_held_out, description)


def token_hash(tokens: Tensor) -> str:
    """sha256, in hex, of token ids as little-endian int64, row after row."""
    return hashlib.sha256(tokens.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def pool_size(count: int, length: int) -> int:
    """Tokens to read for `count` windows; one more than a window at least, so that one can be drawn."""
    return SPREAD * count * length + 1 if count else 0


def tokenized(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str]) -> Iterator[list[int]]:
    """Documents as token ids, each ended by eos; one that was cut before is not cut again."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    token_cache = _cut_by(tokenizer)
    for text in documents:
        if text not in token_cache:
            token_cache[text] = tokenize(tokenizer, text)
        yield token_cache[text] + end


def _cut_by(tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Return the entry of `_CUT` for a tokenizer; empty for one that Python computes, whose rules are unknown."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {}
    rules = hashlib.sha256(backend.to_str().encode()).hexdigest()
    if rules not in _CUT:
        _CUT.clear()
    return _CUT.setdefault(rules, {})


def fill(calibration: Pool, other: Pool, documents: Iterator[list[int]]) -> None:
    """Gives each document to the pool that lacks more, until neither lacks anything."""
    for document in documents:
        (calibration if calibration.filled <= other.filled else other).add(document)
        if calibration.filled >= 1 and other.filled >= 1:
            return


def lacks(pool: Pool) -> bool:
    """Return whether there is less text than is to be drawn, so that windows would only be repetitions."""
    return len(pool.ids) < -(-pool.target // SPREAD)


def _check_pools(calibration: Pool, other: Pool, source: str) -> None:
    """Refuses a source with less text than is to be drawn."""
    for pool, use in ((calibration, "calibration"), (other, "held-out sequences")):
        if lacks(pool):
            least = -(-pool.target // SPREAD)
            raise SurgeryError(
                f"{source} has too little text: {len(pool.ids)} tokens, in {pool.documents} documents, for {use} that "
                f"need {least}; give more text or ask for fewer or shorter sequences"
            )


@dataclass(frozen=True)
class Windows:
    """Windows drawn from pools of text.

    Attributes:
        length: of a window, with the bos.
        recall: share of them with planted recalls, in the ``wording``.
        bos: put before every window; None for none.
    """

    length: int
    recall: float
    bos: int | None
    tokenizer: PreTrainedTokenizerBase
    rng: random.Random
    wording: Wording = in_code

    def draw(self, pool: Pool, count: int) -> LongTensor:
        """[count, length] of a pool."""
        prefix = [] if self.bos is None else [self.bos]
        size = self.length - len(prefix)
        rows = []
        for index in range(count):
            start = self.rng.randint(0, len(pool.ids) - self.length - 1)
            window = pool.ids[start : start + size]
            planted = int((index + 1) * self.recall) > int(index * self.recall)
            rows.append(prefix + (plant(window, self.tokenizer, self.rng, self.wording) if planted else window))
        return torch.tensor(rows, dtype=torch.long).reshape(count, self.length)
