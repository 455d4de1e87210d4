"""Tasks of EleutherAI's lm-evaluation-harness, built-in or defined by the user, with the results of its command line.

A task runs on the main process only, while the others wait: the harness shards only models that it loaded itself, and
sharding changes the batches and with them the rounding. For the same reason an interrupted task starts from scratch.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.logits import evaluation_mode
from surgery.eval.session import Session

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager


@dataclass(frozen=True)
class LmHarnessTask:
    """One task, group or tag of lm-evaluation-harness; None as `num_fewshot` is the task's default.

    RULER's tasks generate prompts of at most ``lengths`` tokens, 4096 if empty, with the ``tokenizer`` of this name.
    """

    task: str
    include_path: Path | None = None
    num_fewshot: int | None = None
    tokenizer: str = ""
    lengths: tuple[int, ...] = ()
    native: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name of the task in `--tasks`."""
        return f"lm-eval:{self.task}"

    def settings(self) -> dict[str, Any]:
        """Return the task's name and the version of its code and configuration.

        Raises SurgeryError: the harness is not installed, the folder does not exist, or there is no such task.
        """
        _require_harness()
        if self.include_path is not None and not self.include_path.is_dir():
            raise SurgeryError(f"{self.name}: the task folder {self.include_path} does not exist")
        with _quiet():
            self._task_manager()
        return {
            "task": self.task,
            "num_fewshot": self.num_fewshot,
            "folder_sha256": None if self.include_path is None else _folder_sha256(self.include_path),
            "lm_eval": version("lm_eval"),
        } | ({"lengths": list(self.lengths)} if self.lengths else {})

    def run(self, model: PreTrainedModel, session: Session, kept: Any = None) -> dict[str, Any]:
        """Run the task on a loaded model, with the seeds of the harness's command line.

        The model is not moved, cast or modified. Relative paths in a user task's YAML refer to the working directory.

        Returns on every process `metrics`, a map from name to `value`, `stderr` and `higher_is_better`; those of a
        group's subtasks are named `subtask/metric` and follow the group's, and a filter other than "none" is part of
        the name. Then `versions` by task; `n_shot`, None if subtasks differ; `n_samples`, the sum over subtasks; and
        `lm_eval`, the harness's version. Raises SurgeryError: see `settings`; or the harness failed.
        """
        self.settings()
        return session.processes.from_main(lambda: self._run(model, session))

    def _run(self, model: PreTrainedModel, session: Session) -> dict[str, Any]:
        from lm_eval import simple_evaluate

        with _quiet(), evaluation_mode(model), session.progress.phase(self.name, 1, "task") as advance:
            try:
                results = simple_evaluate(
                    model=_harness_model(model, session),
                    tasks=[self.task],
                    num_fewshot=self.num_fewshot,
                    limit=session.limit,
                    log_samples=False,
                    task_manager=self._task_manager(),
                )
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # the harness and user tasks may raise any exception
                reason = next(iter(str(error).strip().splitlines()), "")
                raise SurgeryError(f"{self.name} failed in the harness: {type(error).__name__}: {reason}") from error
            advance()
        return _summary(results, self.task)

    def _task_manager(self) -> TaskManager:
        """Return the harness' task index; a single user task skips its own 14,000, whose index takes seconds."""
        index = partial(_index, self.include_path, self.tokenizer, self.lengths)
        if self.include_path is not None:
            own = index(False)
            # Groups and tags may contain built-in tasks.
            if (entry := own.task_index.get(self.task)) is not None and isinstance((entry.cfg or {}).get("task"), str):
                return own
        everything = index(True)
        if self.task not in everything.task_index:
            where = f" and not in {self.include_path}" if self.include_path is not None else ""
            raise SurgeryError(
                f"there is no task {self.task!r} in lm-evaluation-harness {version('lm_eval')}{where}: "
                "see `lm_eval ls tasks`"
            )
        return everything


def _summary(results: dict[str, Any], task: str) -> dict[str, Any]:
    measured = {**results["results"], **results.get("groups", {})}
    metrics: dict[str, dict[str, Any]] = {}
    for name in sorted(measured, key=lambda name: name != task):
        better = results["higher_is_better"].get(name, {})
        for key, value in measured[name].items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            if metric.isdigit() and value == -1:  # RULER's mark of a length without prompts
                continue
            label = metric if filter_name == "none" else key
            metrics[label if name == task else f"{name}/{label}"] = {
                "value": _finite(value),
                "stderr": _finite(measured[name].get(f"{metric}_stderr,{filter_name}")),
                "higher_is_better": better.get(metric),
            }
    shots = set(results["n-shot"].values())
    return {
        "metrics": metrics,
        "versions": dict(results["versions"]),
        "n_shot": shots.pop() if len(shots) == 1 else None,
        "n_samples": sum(samples["effective"] for samples in results["n-samples"].values()),
        "lm_eval": version("lm_eval"),
    }


def _finite(value: Any) -> float | None:
    """Return a float, or None for infinities and NaN, which JSON lacks, and for the harness' "N/A"."""
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def _harness_model(model: PreTrainedModel, session: Session) -> LM:
    from lm_eval.models.huggingface import HFLM

    # A copy, because the harness sets a missing pad token.
    tokenizer = copy.deepcopy(session.tokenizer)
    return HFLM(pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=session.batch_size)


def _require_harness() -> None:
    try:
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise SurgeryError(
            f'lm-eval tasks need lm-evaluation-harness ({error}): pip install "model-surgery[eval]"'
        ) from None


@lru_cache
def _index(include_path: Path | None, tokenizer: str, lengths: tuple[int, ...], built_in: bool) -> TaskManager:
    from lm_eval.tasks import TaskManager

    data = {"tokenizer": tokenizer} | ({"max_seq_lengths": list(lengths)} if lengths else {})
    return TaskManager(
        include_path=include_path and str(include_path), include_defaults=built_in, metadata=data if tokenizer else None
    )


def _folder_sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness' log and skip its environment report.

    The report starts git, which fails outside of a repository, and a dozen other programs; its result is unused.
    """
    from lm_eval import evaluator

    replaced = {"get_git_commit_hash": lambda: None, "add_env_info": lambda results: None}
    originals = {name: getattr(evaluator, name) for name in replaced if hasattr(evaluator, name)}
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    for name in originals:
        setattr(evaluator, name, replaced[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(evaluator, name, original)
        log.setLevel(level)
