"""Conversations as training documents: turns under `messages`, rendered by the tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surgery.calibration.text import jsonl_records, parquet_records
from surgery.checkpoint.disk import disk_errors
from surgery.common.errors import SurgeryError
from surgery.running.chat_templates import ChatTemplate

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
        self._tokenizer, self._chat_template = tokenizer, ChatTemplate(tokenizer)

    def __call__(self, record: dict[str, Any], where: str) -> list[int]:
        """Return the token ids of a conversation, [] without turns; SurgeryError names `where` if there is none."""
        messages = record.get(MESSAGES)
        if not isinstance(messages, list) or not all(isinstance(turn, dict) and "role" in turn for turn in messages):
            raise SurgeryError(f"{where}: {MESSAGES!r} is not a list of turns, each with a role and content")
        if not messages:
            return []
        try:
            text = self._chat_template.render(messages, tools=record.get("tools"))
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
