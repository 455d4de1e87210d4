"""Task `needle`: is one fact found at every depth of every length?"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.generation import complete
from surgery.eval.needle import ANSWER_TOKENS, NeedleHaystack, NeedlePrompt, default_lengths, needle_prompts
from surgery.eval.ruler.domain import find_domain, haystack_text
from surgery.eval.ruler.sample import prompts_sha256
from surgery.eval.session import Session
from surgery.eval.work import Work, at_most, completing

if TYPE_CHECKING:
    from surgery.evaluation.task_data import TaskData


@dataclass(frozen=True)
class NeedleTask:
    """A grid of depths and lengths.

    Attributes:
        lengths: tokens of prompt and answer together; None for `default_lengths` of each model's own limit. Give them
            to compare models of different limits.
        depths: percent of the haystack before the needle.
        trials: prompts a cell.
        domain: "text" or "code".
        haystack: the text around the needles; None for the Python language reference (`domain` "text" only).

    Raises:
        SurgeryError: a field makes no sense.
    """

    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
    trials: int = 4
    domain: str = "text"
    haystack: str | None = None
    name: ClassVar[str] = "needle"
    native: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._text()
        if self.lengths is not None and len(self.lengths) == 0:
            raise SurgeryError("the needle grid has no lengths: give at least one")
        if not self.depths or not all(0 <= depth <= 100 for depth in self.depths):
            raise SurgeryError(f"needle depths {list(self.depths)}: percentages from 0 to 100 are needed")
        if self.trials < 1:
            raise SurgeryError(f"{self.trials} needle trials a cell: at least 1 is needed")

    def settings(self) -> dict[str, Any]:
        """Sizes, and the hash of the haystack text."""
        return {
            "domain": self.domain,
            "lengths": None if self.lengths is None else list(self.lengths),
            "depths": list(self.depths),
            "trials": self.trials,
            "answer_tokens": ANSWER_TOKENS,
            "haystack_sha256": hashlib.sha256(self._text().encode()).hexdigest(),
        }

    def work(self, session: Session) -> Work:
        count = len(self.depths) * max(1, at_most(self.trials, session.limit))
        sizes = (length - ANSWER_TOKENS for length in self.lengths or default_lengths(None))
        return sum((completing(count, size, session.batch_size, ANSWER_TOKENS) for size in sizes), Work())

    def run(self, model: PreTrainedModel, session: Session, kept: None = None) -> dict[str, Any]:
        """Share of needles found in each cell.

        Returns:
            "grid": shares [lengths][depths]; "hits": 0 or 1 for each prompt by length, depth and trial; "accuracy":
            mean of all; "limit": the model's longest context by its config, or None; "beyond_limit": lengths above it;
            and the "lengths", "depths", "trials" and "prompts_sha256" that were used.

        Raises:
            SurgeryError: a length has no room for a needle and its question.
        """
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        lengths = list(self.lengths or default_lengths(limit))
        trials = self.trials if session.limit is None else max(1, min(self.trials, session.limit))
        haystack = NeedleHaystack(session.tokenizer, find_domain(self.domain), self._text())
        prompts = [needle_prompts(haystack, length, self.depths, trials, session.seed) for length in lengths]
        hits = [
            _hits(model, session, row, f"needle, {length} tokens") for length, row in zip(lengths, prompts, strict=True)
        ]
        cells = [[sum(row[start : start + trials]) for start in range(0, len(row), trials)] for row in hits]
        return {
            "lengths": lengths,
            "depths": list(self.depths),
            "trials": trials,
            "grid": [[count / trials for count in row] for row in cells],
            "accuracy": sum(map(sum, hits)) / sum(map(len, hits)),
            "hits": [hit for row in hits for hit in row],
            "limit": limit,
            "beyond_limit": [length for length in lengths if limit is not None and length > limit],
            "prompts_sha256": prompts_sha256(prompt.ids for row in prompts for prompt in row),
        }

    def _text(self) -> str:
        return haystack_text(find_domain(self.domain), self.haystack)


def _hits(model: PreTrainedModel, session: Session, prompts: list[NeedlePrompt], label: str) -> list[int]:
    outputs = complete(model, session, [prompt.ids for prompt in prompts], ANSWER_TOKENS, label)
    return [
        int(prompt.value in session.tokenizer.decode(output)) for prompt, output in zip(prompts, outputs, strict=True)
    ]


def build(data: TaskData) -> NeedleTask:
    """From the settings and texts of an evaluation."""
    asked = data.settings
    return NeedleTask(
        lengths=asked.needle_lengths or default_lengths(data.limit),
        depths=asked.needle_depths,
        trials=asked.needle_trials,
        domain=data.domain,
        haystack=data.haystack(),
    )
