"""Data from which tasks are built: the settings of an evaluation, the tokenizer, and the texts, read on first use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from surgery.calibration.held_out_documents import load_documents
from surgery.calibration.text import BUILTIN
from surgery.eval.held_out_text import Document, HeldOutText, held_out_text
from surgery.evaluation.settings import EvalSettings

OPENINGS, OPENING_CHARACTERS = 3, 160
"""Prompts of the generate task where none are given: openings of documents or sections."""

MOST_CONTEXTS = 4


@dataclass(frozen=True)
class TaskData:
    """Data of an evaluation's tasks, the same for every model of a report.

    Attributes:
        limit: positions of the model; None where its config names none.
        conversations: of the baseline, for `data` "chat".
    """

    settings: EvalSettings
    tokenizer: PreTrainedTokenizerBase
    limit: int | None
    conversations: Callable[[], list[str]] | None = None

    @cached_property
    def documents(self) -> list[Document]:
        """The held-out texts, whole."""
        settings = self.settings
        return load_documents(
            settings.data,
            settings.windows * settings.length,
            seed=settings.seed,
            text_field=settings.text_field,
            conversations=self.conversations,
        )

    @cached_property
    def text(self) -> HeldOutText:
        """Windows of them."""
        settings = self.settings
        return held_out_text(self.tokenizer, self.documents, settings.windows, settings.length, settings.seed)

    @property
    def domain(self) -> str:
        """Domain of needle and ruler prompts: "code" or "text"."""
        if self.settings.domain != "auto":
            return self.settings.domain
        return "code" if set(self.settings.data) <= {BUILTIN, "code"} else "text"

    def haystack(self) -> str | None:
        """Text for prompts: the held-out text, or for prose next to builtin code what the domain has by itself."""
        if self.domain == "text" and self.settings.data == (BUILTIN,):
            return None
        return "\n".join(document.text for document in self.documents)

    def contexts(self) -> tuple[int, ...]:
        """The model's limit and halves of it, none above 32k unless asked for."""
        if self.settings.contexts:
            return self.settings.contexts
        longest = min(self.limit or 4096, 32_768)
        return tuple(sorted(longest >> step for step in range(MOST_CONTEXTS)))

    def openings(self) -> tuple[str, ...]:
        """Texts to complete where none are given."""
        starts = [(document, first) for document in self.documents for first, _ in document.sections][:OPENINGS]
        return tuple(document.text[first : first + OPENING_CHARACTERS] for document, first in starts)
