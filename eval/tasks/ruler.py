"""RULER-style task suite at one or several context lengths."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedModel

from surgery.eval.generation import complete
from surgery.eval.ruler import suite
from surgery.eval.ruler.domain import DOMAINS, haystack_text
from surgery.eval.ruler.sample import Sample, prompts_sha256
from surgery.eval.session import Session

if TYPE_CHECKING:
    from surgery.evaluation.task_data import TaskData


@dataclass(frozen=True)
class RulerTask:
    """Eleven tasks of retrieval, tracing and aggregation; see `surgery.eval.ruler.suite`.

    Attributes:
        lengths: maximum tokens of prompt and answer together.
        samples: samples per task and length. The paper uses 500.
        domain: "text" or "code".
        haystack: prose or source text; None for the Python language reference (`domain` "text" only).
        tasks: names of the tasks, in the order in which they run.

    Raises:
        SurgeryError: a task is unknown, or the haystack is empty.
    """

    lengths: tuple[int, ...] = (4096,)
    samples: int = 50
    domain: str = "text"
    haystack: str | None = None
    tasks: tuple[str, ...] = tuple(suite.TASKS)
    name: ClassVar[str] = "ruler"
    native: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._text()
        suite.check_tasks(self.tasks)

    def settings(self) -> dict[str, Any]:
        """Return sizes, task names, the version of the suite and the hash of the haystack text."""
        return {
            "suite": "RULER-style",
            "version": suite.VERSION,
            "domain": self.domain,
            "lengths": list(self.lengths),
            "samples": self.samples,
            "tasks": list(self.tasks),
            "haystack_sha256": hashlib.sha256(self._text().encode()).hexdigest(),
        }

    def run(self, model: PreTrainedModel, session: Session, kept: None = None) -> dict[str, Any]:
        """Measure the mean share of references found, by length and task, after all prompts are built.

        Returns "lengths": for each, "tasks" with "score" (0 to 1), per-sample "scores", "samples" and "prompts_sha256",
        and the "average" over tasks. "average": mean over the lengths. Raises SurgeryError: a task does not fit in a
        length.
        """
        prompts = {length: self._samples(session, length) for length in self.lengths}
        lengths = {}
        for length, by_task in prompts.items():
            tasks = {task: _measure(model, session, task, length, samples) for task, samples in by_task.items()}
            lengths[str(length)] = {"tasks": tasks, "average": _mean([task["score"] for task in tasks.values()])}
        average = _mean([length["average"] for length in lengths.values()])
        return {"domain": self.domain, "lengths": lengths, "average": average}

    def _samples(self, session: Session, length: int) -> dict[str, list[Sample]]:
        domain = DOMAINS[self.domain]
        haystack = domain.split(self._text())
        count = self.samples if session.limit is None else max(1, min(self.samples, session.limit))
        samples = {}
        with session.progress.phase(f"ruler prompts, {length} tokens", len(self.tasks), "task") as advance:
            for task in self.tasks:
                samples[task] = suite.build(task, session.tokenizer, length, count, session.seed, domain, haystack)
                advance()
        return samples

    def _text(self) -> str:
        return haystack_text(self.haystack)


def _measure(model: PreTrainedModel, session: Session, task: str, length: int, samples: list[Sample]) -> dict[str, Any]:
    ids = [sample.ids for sample in samples]
    outputs = complete(model, session, ids, samples[0].new_tokens, f"{task}, {length} tokens")
    scores = [sample.score(session.tokenizer.decode(output)) for sample, output in zip(samples, outputs, strict=True)]
    return {"score": _mean(scores), "scores": scores, "samples": len(scores), "prompts_sha256": prompts_sha256(ids)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def build(data: TaskData) -> RulerTask:
    """Build the task from the settings and texts of an evaluation."""
    settings = data.settings
    return RulerTask(
        lengths=settings.ruler_lengths or (settings.length,),
        samples=settings.ruler_samples,
        domain=data.domain,
        haystack=data.haystack(),
        tasks=settings.ruler_tasks or tuple(suite.TASKS),
    )
