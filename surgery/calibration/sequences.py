"""Calibration sequences: windows of real text with planted facts and questions for them.

Plain text hardly uses retrieval heads, so loss-weighted statistics drop their directions. Planted recalls retain them
at almost no increase of the loss.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import LongTensor, Tensor

from surgery.calibration.planted import Wording, in_code, plant
from surgery.calibration.settings import ConversionSettings
from surgery.calibration.text import iter_documents
from surgery.common.errors import SurgeryError
from surgery.eval.sequences import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKEN_CACHES: WeakKeyDictionary[PreTrainedTokenizerBase, dict[str, list[int]]] = WeakKeyDictionary()
"""Token ids by text of each tokenizer: a conversion tokenizes its text twice, with and without planted recalls."""

SPREAD = 16
"""Tokens of text to read per token of a window. More makes the windows more diverse, and takes longer."""


@dataclass(frozen=True)
class SequenceRequest:
    """Request for sequences of a text; equal requests give equal sequences of the same text.

    Attributes:
        tokens: calibration tokens, rounded up to whole sequences of ``length``, bos included.
        recall: share of sequences, 0 to 1, with planted facts, evenly spread: the first few have the same share.
        seed: seed of window positions and facts.

    Raises SurgeryError: a field is out of range.
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
                f"{self.tokens} calibration tokens in sequences of {self.length}: at least one token in sequences of "
                "at least two is required"
            )
        if not 0 <= self.recall <= 1:
            raise SurgeryError(f"recall {self.recall}: the share of sequences with planted recalls must be from 0 to 1")
        if self.held_out < 0:
            raise SurgeryError(f"held_out must be at least 0, not {self.held_out}")

    @classmethod
    def of(cls, settings: ConversionSettings, max_positions: int) -> SequenceRequest:
        """Create the request of a conversion, with sequences no longer than the model's limit."""
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
        """Number of calibration sequences N."""
        return -(-self.tokens // self.length)


@dataclass(frozen=True)
class CalibrationSet:
    """Calibration sequences for statistics, and held-out sequences for choices between results.

    Attributes:
        tokens: [N, T] int64, the calibration sequences.
        held_out: [M, T] int64, sequences of the same kind from other documents; M may be 0.
        description: plain values for the report: source, sizes, seed, and the sha256 of each token tensor.
    """

    tokens: LongTensor
    held_out: LongTensor
    description: dict[str, Any]


@dataclass
class Pool:
    """Stream of tokens, with documents separated by eos, from which windows are drawn."""

    target: int
    ids: list[int] = field(default_factory=list)
    documents: int = 0

    @property
    def filled(self) -> float:
        """Tokens in the pool as a share of the target; may exceed 1."""
        return len(self.ids) / self.target if self.target else 1.0

    def add(self, ids: list[int]) -> None:
        """Append a document."""
        self.ids += ids
        self.documents += 1


def build_calibration(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    request: SequenceRequest,
    *,
    bos: int | Literal["tokenizer"] | None = "tokenizer",
) -> CalibrationSet:
    """Build calibration and held-out sequences from a text source.

    Documents are tokenized one by one into the less filled of two pools until both are full, so no document is in both.
    Windows are then drawn at random from the pools, each with ``bos``: an id, None for none, or "tokenizer" for its
    own. Raises SurgeryError: the source cannot be read or has too little text.
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
    """Return the hex sha256 of token ids as little-endian int64 in row-major order."""
    return hashlib.sha256(tokens.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def pool_size(count: int, length: int) -> int:
    """Return the tokens to read for `count` windows, at least one more than a window has."""
    return SPREAD * count * length + 1 if count else 0


def tokenized(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str]) -> Iterator[list[int]]:
    """Yield documents as token ids followed by eos; known documents come from a cache."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    token_cache = _TOKEN_CACHES.setdefault(tokenizer, {})
    for text in documents:
        if text not in token_cache:
            token_cache[text] = tokenize(tokenizer, text)
        yield token_cache[text] + end


def fill(calibration: Pool, other: Pool, documents: Iterator[list[int]]) -> None:
    """Add each document to the less filled pool, until both are full."""
    for document in documents:
        (calibration if calibration.filled <= other.filled else other).add(document)
        if calibration.filled >= 1 and other.filled >= 1:
            return


def lacks(pool: Pool) -> bool:
    """Return whether a pool has fewer tokens than its windows, which would then repeat."""
    return len(pool.ids) < -(-pool.target // SPREAD)


def _check_pools(calibration: Pool, other: Pool, source: str) -> None:
    """Raise SurgeryError if a pool has fewer tokens than its windows."""
    for pool, use in ((calibration, "calibration"), (other, "held-out sequences")):
        if lacks(pool):
            least = -(-pool.target // SPREAD)
            raise SurgeryError(
                f"{source} has too little text: {len(pool.ids)} tokens, in {pool.documents} documents; {use} needs "
                f"{least} tokens. Use more text, or fewer or shorter sequences"
            )


@dataclass(frozen=True)
class Windows:
    """Sampler of windows from pools of text.

    Attributes:
        length: tokens of a window, bos included.
        recall: share of windows with planted recalls, in the ``wording``.
        bos: first token of each window; None for none.
    """

    length: int
    recall: float
    bos: int | None
    tokenizer: PreTrainedTokenizerBase
    rng: random.Random
    wording: Wording = in_code

    def draw(self, pool: Pool, count: int) -> LongTensor:
        """Draw windows [count, length] from a pool."""
        prefix = [] if self.bos is None else [self.bos]
        size = self.length - len(prefix)
        rows = []
        for index in range(count):
            start = self.rng.randint(0, len(pool.ids) - self.length - 1)
            window = pool.ids[start : start + size]
            planted = int((index + 1) * self.recall) > int(index * self.recall)
            rows.append(prefix + (plant(window, self.tokenizer, self.rng, self.wording) if planted else window))
        return torch.tensor(rows, dtype=torch.long).reshape(count, self.length)
