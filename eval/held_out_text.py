"""Held-out text as windows of tokens, with the source and the UTF-8 bytes of each token."""

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
from surgery.eval.sequences import check_longer_than, random_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Document:
    """One long text with sections in order: their first character, the first at 0, and the name of the source."""

    text: str
    sections: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class HeldOutText:
    """Token windows [N, T] int64 for loss evaluation; every window starts with the tokenizer's bos if it has one.

    Attributes:
        source: [N, T] int64, index into `sources` for every token.
        bytes: [N, T] int64, UTF-8 bytes of every token; 0 for bos.
        ids: [L] int64, tokens of the whole text in order, from which the windows are drawn.
    """

    tokens: LongTensor
    source: LongTensor
    bytes: LongTensor
    sources: tuple[str, ...]
    ids: LongTensor

    @property
    def sha256(self) -> str:
        """Hash of the windows; equal hashes mean equal data."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()

    def first(self, count: int | None) -> HeldOutText:
        """Return the first `count` windows; None returns all."""
        return HeldOutText(self.tokens[:count], self.source[:count], self.bytes[:count], self.sources, self.ids)


def held_out_text(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], windows: int, length: int, seed: int
) -> HeldOutText:
    """Draw random windows of ``length`` tokens, bos included, in turn from each of the texts that documents belong to.

    The name of its first section tells which. The tokenizer's eos separates documents. Windows may overlap, so
    intervals are slightly too narrow for a short text. Raises SurgeryError: no documents, fewer windows than texts, or
    too little text.
    """
    if not documents:
        raise SurgeryError("no held-out text: give --data a file or a dataset that is not empty")
    names = sorted({name for document in documents for _, name in document.sections})
    texts = list(dict.fromkeys(document.sections[0][1] for document in documents))
    if windows < len(texts):
        raise SurgeryError(
            f"windows {windows}: fewer than the {len(texts)} held-out texts ({', '.join(texts)})",
            setting="windows",
            hint=f"--windows {len(texts)}",
        )
    parts = []
    for document in documents:
        text = texts.index(document.sections[0][1])
        ids, ends = _tokens_and_ends(tokenizer, document.text)
        starts = [0, *ends[:-1]]
        firsts = [first for first, _ in document.sections]
        source = [names.index(document.sections[bisect.bisect_right(firsts, start) - 1][1]) for start in starts]
        sizes = _bytes_between(document.text, starts, ends)
        parts.append(np.array([ids, source, sizes, [text] * len(ids)], dtype=np.int64))
        if tokenizer.eos_token_id is not None and document is not documents[-1]:
            eos = [[tokenizer.eos_token_id], [source[-1] if source else 0], [0], [text]]
            parts.append(np.array(eos, dtype=np.int64))
    ids, source, size, text_of = torch.from_numpy(np.concatenate(parts, axis=1))
    bos = tokenizer.bos_token_id
    index = torch.empty(windows, length, dtype=torch.long)
    for number, name in enumerate(texts):
        positions = np.flatnonzero(text_of == number)
        check_longer_than(len(positions), length, name if len(texts) > 1 else "the text")
        part = index[number :: len(texts)]
        part[:] = random_windows(positions, len(part), length, seed, None if bos is None else -1)
    has_text, index = index >= 0, index.clamp(min=0)
    tokens = ids[index] if bos is None else ids[index].where(has_text, bos)
    return HeldOutText(tokens, source[index], size[index] * has_text, tuple(names), ids)


def _tokens_and_ends(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a text and the end character offset (exclusive) of each token."""
    if not tokenizer.is_fast:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        # Slow tokenizers give no offsets. Lengths of decoded tokens are off by a character or two if a token holds
        # only part of a character.
        ends = np.minimum(np.cumsum([len(tokenizer.decode([i])) for i in ids]), len(text))
        return ids, ends.tolist()
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    # A character that spans several tokens is counted at its last token.
    ends = np.maximum.accumulate([end for _, end in encoded.offset_mapping] or [0])
    return encoded.input_ids, ends.tolist()


def _bytes_between(text: str, starts: Sequence[int], ends: Sequence[int]) -> list[int]:
    if text.isascii():
        return [end - start for start, end in zip(starts, ends, strict=True)]
    return [len(text[start:end].encode("utf-8")) for start, end in zip(starts, ends, strict=True)]
