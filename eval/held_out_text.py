"""Held-out text as windows of tokens, each token knowing which text it is from and how many bytes it stands for."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import LongTensor

from surgery.common.errors import SurgeryError
from surgery.eval.sequences import random_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Document:
    """One long text.

    Attributes:
        text: the text.
        sections: where its parts begin, as (first character, name of the source), in order, the first at 0.
    """

    text: str
    sections: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class HeldOutText:
    """Windows of text to measure losses on.

    Attributes:
        tokens: [N, T] int64, every window starting with the tokenizer's bos if it has one.
        source: [N, T] int64, index into `sources` of every token.
        bytes: [N, T] int64, UTF-8 bytes that every token stands for; 0 for a bos.
        sources: names of the texts.
        ids: [L] int64, the tokens of all text in its order, from which the windows were drawn.
    """

    tokens: LongTensor
    source: LongTensor
    bytes: LongTensor
    sources: tuple[str, ...]
    ids: LongTensor

    @property
    def sha256(self) -> str:
        """Hash of the windows: equal hashes are equal data."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()

    def first(self, count: int | None) -> HeldOutText:
        """The first `count` windows; all for None."""
        return HeldOutText(self.tokens[:count], self.source[:count], self.bytes[:count], self.sources, self.ids)


def held_out_text(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], windows: int, length: int, seed: int
) -> HeldOutText:
    """Draws random windows from the documents, one after the other as one long text.

    Between documents stands the tokenizer's eos, if it has one. Windows may overlap, so intervals computed from them
    are a little too narrow where many are drawn from a short text.

    Args:
        windows: N. length: T, bos included.

    Raises:
        SurgeryError: no documents, or too little text.
    """
    if not documents:
        raise SurgeryError("no held-out text: give --data a file or a dataset that is not empty")
    names = sorted({name for document in documents for _, name in document.sections})
    parts = []
    for document in documents:
        ids, ends = _tokens_and_ends(tokenizer, document.text)
        starts = [0, *ends[:-1]]
        firsts = [first for first, _ in document.sections]
        source = [names.index(document.sections[bisect.bisect_right(firsts, start) - 1][1]) for start in starts]
        parts.append(np.array([ids, source, _bytes_between(document.text, starts, ends)], dtype=np.int64))
        if tokenizer.eos_token_id is not None and document is not documents[-1]:
            parts.append(np.array([[tokenizer.eos_token_id], [source[-1] if source else 0], [0]], dtype=np.int64))
    ids, source, size = np.concatenate(parts, axis=1)
    bos = tokenizer.bos_token_id
    tokens = random_windows(ids, windows, length, seed, bos)
    # Indices are drawn by the same draw, so that they lie next to their tokens.
    index = random_windows(np.arange(len(ids)), windows, length, seed, None if bos is None else -1)
    text = index >= 0
    return HeldOutText(
        tokens,
        torch.from_numpy(source)[index.clamp(min=0)],
        torch.from_numpy(size)[index.clamp(min=0)] * text,
        tuple(names),
        torch.from_numpy(ids),
    )


def _tokens_and_ends(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    """Token ids of a text, and the character after which each ends."""
    if not tokenizer.is_fast:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        # Without offsets: the lengths of the pieces, good to a character or two where a piece is part of one.
        ends = np.minimum(np.cumsum([len(tokenizer.decode([i])) for i in ids]), len(text))
        return ids, ends.tolist()
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    # A character of several tokens ends with its last one.
    ends = np.maximum.accumulate([end for _, end in encoded.offset_mapping] or [0])
    return encoded.input_ids, ends.tolist()


def _bytes_between(text: str, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    if text.isascii():
        return [end - start for start, end in zip(starts, ends, strict=True)]
    return [len(text[start:end].encode("utf-8")) for start, end in zip(starts, ends, strict=True)]
