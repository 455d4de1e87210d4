"""Conversations as training documents: rendered by the tokenizer's own chat template, labelled where the model speaks.

A record holds the turns under `messages`, each with a `role` and what its template asks for, and may hold `tools`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surgery.calibration.text import jsonl_records, parquet_records
from surgery.checkpoint.disk import disk_errors
from surgery.common.errors import SurgeryError
from surgery.running.chat_templates import ChatTemplate
from surgery.training.token_file import Document

MESSAGES = "messages"
READABLE = (".jsonl", ".parquet")

# transformers looks for the same, and gives no mask without it.
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatEncoder:
    """Turns records into documents.

    Labels are on the tokens that the template puts between `{% generation %}` and `{% endgeneration %}`, which are the
    assistant's; a template without these marks leaves nothing to tell turns apart by, and then all tokens count.

    Attributes:
        marked: whether the template marks them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, note: Callable[[str], None] = lambda text: None) -> None:
        """`note` takes the line that says that all tokens count.

        Raises:
            SurgeryError: the tokenizer has no chat template, or one that needs offsets it cannot give.
        """
        try:
            self.template = tokenizer.get_chat_template()
        except ValueError:
            raise SurgeryError(
                f"{tokenizer.name_or_path or 'the tokenizer'}: has no chat template to write conversations with; give"
                " text instead, or the tokenizer of a model for chats"
            ) from None
        self._chat_template = ChatTemplate(tokenizer)
        self.marked = GENERATION.search(self.template) is not None
        if self.marked and not tokenizer.is_fast:
            raise SurgeryError("labels on the assistant's turns need a fast tokenizer, and this one is not")
        if not self.marked:
            note("the chat template does not mark what the assistant says: labels are on all tokens")

    def __call__(self, record: dict[str, Any], where: str) -> Document | None:
        """A record's document; None if it has no token to be predicted.

        Raises:
            SurgeryError: the record, which `where` names, holds no conversation, or none that the template takes.
        """
        messages = record.get(MESSAGES)
        if not isinstance(messages, list) or not all(isinstance(turn, dict) and "role" in turn for turn in messages):
            raise SurgeryError(f"{where}: {MESSAGES!r} is not a list of turns, each with a role and content")
        if not messages:
            return None
        try:
            rendered = self._chat_template.render(messages, tools=record.get("tools"), mark_assistant=self.marked)
        except SurgeryError as error:
            raise SurgeryError(f"{where}: {error}") from error
        tokens, marks = self._chat_template.tokens(rendered)
        if not tokens or (self.marked and not any(marks)):
            return None
        return Document(tokens, marks if self.marked else None)


def holds_conversations(path: Path) -> bool:
    """Whether the first record of a jsonl or parquet file has messages. Faults are left for those who read it all."""
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
    """The records of a jsonl or parquet file, and what to call each in an error.

    Raises:
        SurgeryError: the file is of another kind, cannot be read or is damaged.
    """
    if path.suffix.lower() not in READABLE:
        raise SurgeryError(f"cannot read conversations from {path}: known are {', '.join(READABLE)}")
    with disk_errors(path):
        if path.suffix.lower() == ".parquet":
            yield from ((without_nulls(row), where) for row, where in parquet_records(path, MESSAGES, "tools"))
            return
        for record, where in jsonl_records(path):
            if not isinstance(record, dict):
                raise SurgeryError(f"{where} holds a {type(record).__name__}, not an object with {MESSAGES!r}")
            yield record, where


def without_nulls(record: Any) -> Any:
    """A record as it was before columns gave every turn the keys of all others."""
    if isinstance(record, dict):
        return {key: without_nulls(value) for key, value in record.items() if value is not None}
    return [without_nulls(value) for value in record] if isinstance(record, list) else record
