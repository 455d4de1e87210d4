"""Tasks of lm-evaluation-harness, built-in or defined by the user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel

from surgery.eval import lm_harness
from surgery.eval.session import Session


@dataclass(frozen=True)
class LmHarnessTask:
    """One task, group or tag of lm-evaluation-harness.

    Attributes:
        task: name in the harness.
        include_path: folder of user tasks.
        num_fewshot: few-shot examples per prompt; None for the task's default.
    """

    task: str
    include_path: Path | None = None
    num_fewshot: int | None = None
    native: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name of the task in `--tasks`."""
        return f"lm-eval:{self.task}"

    def settings(self) -> dict[str, Any]:
        """Return the task's name and the version of its code and configuration.

        Raises:
            SurgeryError: the harness is not installed, the folder does not exist, or there is no such task.
        """
        identity = lm_harness.task_identity(self.task, self.include_path)
        return {"task": self.task, "num_fewshot": self.num_fewshot, **identity}

    def run(self, model: PreTrainedModel, session: Session, kept: Any = None) -> dict[str, Any]:
        """Run the task and return its metrics; see `lm_harness.evaluate`."""
        return lm_harness.evaluate(model, session, self.task, self.include_path, self.num_fewshot)
