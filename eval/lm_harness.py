"""Any task of EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), on a model that
is already loaded, with the numbers that the harness' own command line gives.

A task is run by the main process alone, while the others wait. The harness shards only models that it loaded itself,
and its shards would batch other requests together, which changes rounding: two processes would not give the numbers of
one. An interrupted task starts from scratch, for the same reason: the harness' cache keeps requests one by one.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.logits import evaluation_mode
from surgery.eval.session import Session

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager


def task_identity(task: str, include_path: Path | None) -> dict[str, Any]:
    """Return the facts that tell one version of a task from another, without loading its data.

    Returns:
        `folder_sha256` of all files under `include_path` (None without one), data and code of user tasks included;
        `lm_eval`, the harness' version, which decides its own tasks. Data from the Hub is not part of it: the harness
        takes the newest unless a task pins a revision.

    Raises:
        SurgeryError: the harness is not installed, the folder does not exist, or there is no such task.
    """
    _require_harness()
    if include_path is not None and not include_path.is_dir():
        raise SurgeryError(f"lm-eval:{task}: the task folder {include_path} does not exist")
    with _quiet():
        _manager(task, include_path)
    return {
        "folder_sha256": None if include_path is None else _folder_sha256(include_path),
        "lm_eval": version("lm_eval"),
    }


def evaluate(
    model: PreTrainedModel, session: Session, task: str, include_path: Path | None, num_fewshot: int | None
) -> dict[str, Any]:
    """Runs one task, group or tag of the harness on a loaded model, with the seeds of its command line.

    The model is neither moved nor cast nor changed. The harness takes the longest context from the model's config.

    Args:
        task: as the harness names it.
        include_path: folder of the user's own tasks, searched besides the harness'. Data files that its YAML names by
            a relative path are looked for in the working directory, as by the harness itself.
        num_fewshot: examples in each prompt; None for what the task says.

    Returns:
        `metrics`: name to `value`, `stderr` (None where the harness has none) and `higher_is_better`; those of a
        group's subtasks are called `subtask/metric` and follow the group's own. A filter other than "none" is part
        of the name, as in `exact_match,strict-match`. Then `versions` by task; `n_shot`, None if subtasks differ;
        `n_samples` of all subtasks together; and `lm_eval`, the harness' version. On every process.

    Raises:
        SurgeryError: see `task_identity`; or the harness failed, for instance because data is neither here nor to be
            downloaded, or because the task runs code that a model wrote.
    """
    task_identity(task, include_path)
    return session.processes.from_main(lambda: _evaluate(model, session, task, include_path, num_fewshot))


def _evaluate(
    model: PreTrainedModel, session: Session, task: str, include_path: Path | None, num_fewshot: int | None
) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    with _quiet(), evaluation_mode(model), session.progress.phase(f"lm-eval:{task}", 1, "task") as advance:
        try:
            results = simple_evaluate(
                model=_wrapped(model, session),
                tasks=[task],
                num_fewshot=num_fewshot,
                limit=session.limit,
                log_samples=False,
                task_manager=_manager(task, include_path),
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the harness, its tasks and the user's own raise whatever they like
            reason = next(iter(str(error).strip().splitlines()), "")
            raise SurgeryError(f"lm-eval:{task} failed in the harness: {type(error).__name__}: {reason}") from error
        advance()
    return _summary(results, task)


def _summary(results: dict[str, Any], task: str) -> dict[str, Any]:
    measured = {**results["results"], **results.get("groups", {})}
    metrics: dict[str, dict[str, Any]] = {}
    for name in sorted(measured, key=lambda name: name != task):
        better = results["higher_is_better"].get(name, {})
        for key, value in measured[name].items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr"):
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
    """JSON knows no infinities, and the harness says "N/A"."""
    return float(value) if isinstance(value, Real) and math.isfinite(value) else None


def _wrapped(model: PreTrainedModel, session: Session) -> LM:
    """The model as the harness sees it."""
    from lm_eval.models.huggingface import HFLM

    # The harness sets a pad token where there is none: on a copy.
    tokenizer = copy.deepcopy(session.tokenizer)
    return HFLM(pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=session.batch_size)


def _require_harness() -> None:
    try:
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise SurgeryError(
            f'lm-eval tasks need lm-evaluation-harness ({error}): pip install "model-surgery[eval]"'
        ) from None


def _manager(task: str, include_path: Path | None) -> TaskManager:
    """The harness' index of tasks. Reading its own 14,000 takes seconds, and a single task of the user needs none."""
    if include_path is not None:
        own = _index(str(include_path), False)
        # A group or a tag may have members of the harness' own.
        if (entry := own.task_index.get(task)) is not None and isinstance((entry.cfg or {}).get("task"), str):
            return own
    everything = _index(include_path and str(include_path), True)
    if task not in everything.task_index:
        where = f" and not in {include_path}" if include_path is not None else ""
        raise SurgeryError(
            f"there is no task {task!r} in lm-evaluation-harness {version('lm_eval')}{where}: see `lm_eval ls tasks`"
        )
    return everything


@lru_cache
def _index(include_path: str | None, built_in: bool) -> TaskManager:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=built_in)


def _folder_sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness' log off the screen, and its record of the machine out.

    That record starts git, which complains outside of a repository, and a dozen other programs; nothing of it is read.
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
