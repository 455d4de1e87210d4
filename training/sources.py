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
from surgery.calibration.text import BUILTIN, dataset_records, iter_documents, jsonl_records, parquet_records
from surgery.checkpoint.disk import disk_errors
from surgery.common.errors import SurgeryError
from surgery.common.file_settings import FileSettings
from surgery.running.chat_templates import render_chat

FORMATS = ("auto", "text", "chat")
TOKENIZED_AT_ONCE = 64
"""Texts per call of the tokenizer, which processes them in parallel. The first calls have fewer, since a source with a
token limit may need no more."""


@dataclass(frozen=True)
class TextSource(FileSettings):
    """One source of a mixture.

    Attributes:
        source: "builtin", "prose" or "code" of the running Python, "docstrings" of installed packages, a txt, jsonl,
            json or parquet file, or a dataset `name:config:split`, which is streamed.
        format: "chat" for records with `messages`, "text", or "auto": chat for files whose first record has `messages`.
        tokens: tokens after which reading stops; None reads all.
    """

    source: str
    weight: float = 1.0
    format: str = "auto"
    text_field: str = "text"
    tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise SurgeryError(f"data: source must be a file, a dataset or {BUILTIN!r}, not {self.source!r}")
        if self.format not in FORMATS:
            raise SurgeryError(f"{self.source}: unknown format {self.format!r}; choose one of {', '.join(FORMATS)}")
        if self.tokens is not None and self.tokens < 1:
            raise SurgeryError(f"{self.source}: tokens must be at least 1, not {self.tokens}")

    @property
    def is_chat(self) -> bool:
        """Return whether the records are conversations; format "auto" reads the file's first record."""
        return self.format == "chat" or (self.format == "auto" and self._is_file and holds_conversations(self._path))

    @property
    def wording(self) -> Wording:
        """Wording of the facts planted in this source's text."""
        return TEXTS[self.source][2] if self.source in TEXTS else in_code

    @property
    def _ships(self) -> bool:
        return self.source in (BUILTIN, *TEXTS)

    @property
    def _path(self) -> Path:
        return Path(self.source).expanduser()

    @property
    def _is_file(self) -> bool:
        return not self._ships and self._path.is_file()

    def identity(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the JSON values that determine the documents, as far as they are known without reading them."""
        facts: dict[str, Any] = {"source": self.source, "tokens": self.tokens, "chat": self.is_chat}
        facts["tokenizer"] = _tokenizer_hash(tokenizer, chat=self.is_chat)
        if not self.is_chat:
            facts["text_field"] = self.text_field
        if self._ships:
            facts["python"] = sys.version
        elif self._is_file:
            status = self._path.stat()
            facts["file"] = [str(self._path.resolve()), status.st_size, status.st_mtime_ns]
        return facts

    def documents(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
        """Yield the tokenized documents in the source's order; texts end with eos, conversations as in the template.

        Raises SurgeryError: the source cannot be read.
        """
        if self.source in TEXTS:
            return encode_texts(TEXTS[self.source][0](0), tokenizer)
        if not self.is_chat:
            return encode_texts(iter_documents(self.source, text_field=self.text_field), tokenizer)
        if self._is_file:
            records = read_records(self._path)
        else:
            records = ((without_nulls(row), where) for row, where in dataset_records(self.source))
        encode = ChatEncoder(tokenizer)
        return (encode(record, where) for record, where in records)


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


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> str:
    """Compute the sha256 of the tokenizer's rules, and of its chat template for conversations."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    for setting in ("truncation", "padding"):  # state of the tokenizer's last call
        rules.pop(setting, None)
    parts = [type(tokenizer).__name__, json.dumps(rules, sort_keys=True), str(tokenizer.eos_token_id)]
    if chat:
        parts.append(json.dumps(tokenizer.chat_template))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


MESSAGES = "messages"
READABLE = (".jsonl", ".parquet")


class ChatEncoder:
    """Encoder of conversation records to token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Wrap a tokenizer. Raises SurgeryError if it has no chat template."""
        try:
            tokenizer.get_chat_template()
        except ValueError:
            raise SurgeryError(
                f"{tokenizer.name_or_path or 'the tokenizer'}: has no chat template, which conversations need; use"
                " plain text, or the tokenizer of a chat model"
            ) from None
        self._tokenizer = tokenizer

    def __call__(self, record: dict[str, Any], where: str) -> list[int]:
        """Return the token ids of a conversation, [] without turns; SurgeryError names `where` if there is none."""
        messages = record.get(MESSAGES)
        if not isinstance(messages, list) or not all(isinstance(turn, dict) and "role" in turn for turn in messages):
            raise SurgeryError(f"{where}: {MESSAGES!r} is not a list of turns, each with a role and content")
        if not messages:
            return []
        try:
            text = render_chat(self._tokenizer, messages, tools=record.get("tools"))
        except SurgeryError as error:
            raise SurgeryError(f"{where}: {error}") from error
        return self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def holds_conversations(path: Path) -> bool:
    """Return whether the first record of a jsonl or parquet file has messages; damaged files are False."""
    with disk_errors(path):
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet as pq
            from pyarrow import ArrowInvalid

            try:
                return MESSAGES in pq.read_schema(path).names
            except ArrowInvalid:
                return False
        if path.suffix.lower() != ".jsonl":
            return False
        with path.open("rb") as file:
            line = next((line for line in file if line.strip()), b"{}")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and MESSAGES in record


def read_records(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the records of a jsonl or parquet file, each with its name for errors.

    Raises SurgeryError: the file has another format, cannot be read or is damaged.
    """
    if path.suffix.lower() not in READABLE:
        raise SurgeryError(f"{path}: conversations in this file type are not supported; use {', '.join(READABLE)}")
    with disk_errors(path):
        if path.suffix.lower() == ".parquet":
            yield from ((without_nulls(row), where) for row, where in parquet_records(path, MESSAGES, "tools"))
            return
        for record, where in jsonl_records(path):
            if not isinstance(record, dict):
                raise SurgeryError(f"{where} holds a {type(record).__name__}, not an object with {MESSAGES!r}")
            yield record, where


def without_nulls(record: Any) -> Any:
    """Remove null entries from a record: columnar storage gives every turn the keys of all turns."""
    if isinstance(record, dict):
        return {key: without_nulls(value) for key, value in record.items() if value is not None}
    return [without_nulls(value) for value in record] if isinstance(record, list) else record
