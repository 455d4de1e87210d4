"""Sources of training data, and their tokenized documents."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surgery.calibration.mixture import DEFAULT, SMALL_VOCABULARY, TEXTS, without_chat
from surgery.calibration.planted import Wording, in_code
from surgery.calibration.text import BUILTIN, iter_documents
from surgery.common.errors import SurgeryError
from surgery.common.file_settings import FileSettings

TOKENIZED_AT_ONCE = 64
"""Texts per call of the tokenizer, which processes them in parallel. The first calls have fewer, since a source with a
token limit may need no more."""


@dataclass(frozen=True)
class TextSource(FileSettings):
    """One source of a mixture.

    Attributes:
        source: "builtin", "prose" or "code" of the running Python, "docstrings" of installed packages, a txt, jsonl,
            json or parquet file, or a dataset `name:config:split`, which is streamed.
        tokens: tokens after which reading stops; None reads all.
    """

    source: str
    weight: float = 1.0
    text_field: str = "text"
    tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise SurgeryError(f"data: source must be a file, a dataset or {BUILTIN!r}, not {self.source!r}")
        if self.tokens is not None and self.tokens < 1:
            raise SurgeryError(f"{self.source}: tokens must be at least 1, not {self.tokens}")

    @property
    def wording(self) -> Wording:
        """Wording of the facts planted in this source's text."""
        return TEXTS[self.source][2] if self.source in TEXTS else in_code

    def identity(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the JSON values that determine the documents, as far as they are known without reading them."""
        facts = {"source": self.source, "tokens": self.tokens, "text_field": self.text_field}
        facts["tokenizer"] = _tokenizer_hash(tokenizer)
        path = Path(self.source).expanduser()
        if self.source in (BUILTIN, *TEXTS):
            facts["python"] = sys.version
        elif path.is_file():
            status = path.stat()
            facts["file"] = [str(path.resolve()), status.st_size, status.st_mtime_ns]
        return facts

    def documents(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
        """Yield the tokenized documents in the source's order, each ended by eos.

        Raises SurgeryError: the source cannot be read.
        """
        if self.source in TEXTS:
            return encode_texts(TEXTS[self.source][0](0), tokenizer)
        return encode_texts(iter_documents(self.source, text_field=self.text_field), tokenizer)


def parse_sources(data: Sequence[str | dict[str, Any]]) -> list[TextSource]:
    """Parse the setting `data`: names of sources, or mappings with the fields of `TextSource`.

    Raises SurgeryError: an entry is invalid.
    """
    sources = []
    for number, entry in enumerate(data, 1):
        if isinstance(entry, dict):
            if "source" not in entry:
                raise SurgeryError(f"data, entry {number}: `source` is missing; add it")
            sources.append(TextSource.from_mapping(entry, f"data, entry {number}"))
        else:
            sources.append(TextSource(entry))
    return sources


def fitting(sources: Sequence[TextSource], tokenizer: PreTrainedTokenizerBase) -> list[TextSource]:
    """Replace "builtin" by prose and code; a tokenizer below `SMALL_VOCABULARY` keeps it, which is code alone."""
    choices = []
    for source in sources:
        if source.source != BUILTIN or len(tokenizer) < SMALL_VOCABULARY:
            choices.append(source)
            continue
        for name, share in without_chat(DEFAULT).items():
            tokens = None if source.tokens is None else max(1, round(share * source.tokens))
            choices.append(replace(source, source=name, weight=share * source.weight, tokens=tokens))
    return choices


def encode_texts(texts: Iterator[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Tokenize texts, each ended by the tokenizer's eos if it has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    count = 1
    while batch := list(islice(texts, count)):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False).input_ids:
            yield ids + end
        count = min(2 * count, TOKENIZED_AT_ONCE)


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Compute the sha256 of the tokenizer's rules."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    for setting in ("truncation", "padding"):  # state of the tokenizer's last call
        rules.pop(setting, None)
    parts = [type(tokenizer).__name__, json.dumps(rules, sort_keys=True), str(tokenizer.eos_token_id)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
