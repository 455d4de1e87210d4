"""Data from which tasks are built: settings, tokenizer, and texts that are read on first use."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from surgery.calibration.held_out_documents import load_documents
from surgery.calibration.text import BUILTIN
from surgery.eval.held_out_text import Document, HeldOutText, held_out_text
from surgery.evaluation.settings import EvalSettings

OPENINGS, OPENING_CHARACTERS = 3, 160
"""Number and length of the default prompts of the generate task, which are openings of document sections."""

MOST_CONTEXTS = 4


@dataclass(frozen=True)
class TaskData:
    """Data of an evaluation's tasks, the same for every model of a report.

    Attributes:
        limit: maximum positions of the model; None if the config has none.
    """

    settings: EvalSettings
    tokenizer: PreTrainedTokenizerBase
    limit: int | None

    @cached_property
    def documents(self) -> list[Document]:
        """Held-out documents in full."""
        settings = self.settings
        return load_documents(
            settings.data, settings.windows * settings.length, seed=settings.seed, text_field=settings.text_field
        )

    @cached_property
    def text(self) -> HeldOutText:
        """Token windows of the held-out documents."""
        settings = self.settings
        return held_out_text(self.tokenizer, self.documents, settings.windows, settings.length, settings.seed)

    @property
    def sha256(self) -> str:
        """Hash of the tokens of all documents and of the windows."""
        return hashlib.sha256(self.text.ids.numpy().tobytes() + self.text.tokens.numpy().tobytes()).hexdigest()

    @property
    def domain(self) -> str:
        """Domain of needle prompts: "code" or "text"."""
        if self.settings.domain != "auto":
            return self.settings.domain
        return "code" if set(self.settings.data) <= {BUILTIN, "code"} else "text"

    def haystack(self) -> str | None:
        """Return the held-out text as haystack; None (the default prose) for built-in code in domain "text"."""
        if self.domain == "text" and self.settings.data == (BUILTIN,):
            return None
        return "\n".join(document.text for document in self.documents)

    def contexts(self) -> tuple[int, ...]:
        """Return the contexts of the speed task; by default the model's limit, at most 32k, and halves of it."""
        if self.settings.contexts:
            return self.settings.contexts
        longest = min(self.limit or 4096, 32_768)
        return tuple(sorted(longest >> step for step in range(MOST_CONTEXTS)))

    def openings(self) -> tuple[str, ...]:
        """Return the default prompts of the generate task: openings of the first sections."""
        starts = [(document, first) for document in self.documents for first, _ in document.sections][:OPENINGS]
        return tuple(document.text[first : first + OPENING_CHARACTERS] for document, first in starts)
