"""Any task of EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), on a model that
is already loaded, with the numbers that the harness' own command line gives.

A task is run by the main process alone, while the others wait. The harness shards only models that it loaded itself,
and its shards would batch other requests together, which changes rounding: two processes would not give the numbers of
one. An interrupted task starts anew, for the same reason: the harness' cache keeps requests one by one.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
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
    """What tells one version of a task from another, without loading its data.

    Returns:
        `config_sha256` of the resolved YAML of the task, or of everything in its group or tag; `folder_sha256` of
        all files under `include_path` (None without one), data and code of user tasks included; `lm_eval`, the
        harness' version, which decides the code of the built-in tasks. Data from the Hub is not part of it: the harness
        takes the newest unless a task pins a revision.

    Raises:
        SurgeryError: the harness is not installed, the folder does not exist, or there is no such task.
    """
    _require_harness()
    if include_path is not None and not include_path.is_dir():
        raise SurgeryError(f"lm-eval:{task}: the task folder {include_path} does not exist")
    with _quiet():
        index = _manager(task, include_path).task_index
    # A group may define members of its own, which no index has: its config says what they are.
    configs = {name: index[name].cfg for name in _reached(task, index) if name in index}
    text = json.dumps(configs, sort_keys=True, default=str)
    for root in (_built_in_tasks(), include_path):
        # Functions are named by the file they are in; where that is installed is no part of the task.
        text = text.replace(str(root.resolve()), "") if root is not None else text
    return {
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
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

    with _quiet(), evaluation_mode(model):
        try:
            results = simple_evaluate(
                model=_wrapped(model, session, f"lm-eval:{task}"),
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


def _wrapped(model: PreTrainedModel, session: Session, label: str) -> LM:
    """The model as the harness sees it, with bars of the session's own in place of the harness'."""
    from lm_eval.models.huggingface import HFLM

    class LoadedModel(HFLM):
        def loglikelihood(self, requests, disable_tqdm=True):
            with self._shown(requests):
                return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests, disable_tqdm=True):
            with self._shown(requests):
                return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def generate_until(self, requests, disable_tqdm=True):
            with self._shown(requests):
                return super().generate_until(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests, disable_tqdm=True, **kwargs):
            return super()._loglikelihood_tokens(requests, disable_tqdm=True, **kwargs)

        @contextmanager
        def _shown(self, requests):
            with session.progress.phase(label, len(requests), "request") as advance:
                self.set_cache_hook(_FinishedRequests(advance))
                yield

    # The harness sets a pad token where there is none: on a copy.
    tokenizer = copy.deepcopy(session.tokenizer)
    return LoadedModel(pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=session.batch_size)


class _FinishedRequests:
    """Stands where the harness expects its response cache, which hears of every request as it is finished."""

    def __init__(self, advance: Any) -> None:
        self._advance = advance

    def add_partial(self, *_: Any) -> None:
        self._advance()


def _require_harness() -> None:
    try:
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise SurgeryError(
            f'lm-eval tasks need lm-evaluation-harness ({error}): pip install "model-surgery[eval]"'
        ) from None


def _manager(task: str, include_path: Path | None) -> TaskManager:
    """The harness' index of tasks. Reading its own 14,000 takes seconds, and most user tasks need none of them."""
    if include_path is not None:
        own = _index(str(include_path), False)
        if all(name in own.task_index for name in _reached(task, own.task_index)):
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


def _reached(task: str, index: dict[str, Any]) -> list[str]:
    """Names of a task and, if it is a group or a tag, of everything in it, whether the index has them or not."""
    names = [task]
    for name in names:  # which grows meanwhile
        entry = index.get(name)
        if entry is None:
            continue
        members = sorted(entry.tags) if entry.cfg is None else entry.cfg.get("task")
        for member in members if isinstance(members, list) else []:
            member = member if isinstance(member, str) else member.get("task") or member.get("group")
            if member not in names:
                names.append(member)
    return names


def _built_in_tasks() -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent


def _folder_sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the harness' log, and the bars that it and datasets show outside of the model, off the screen.

    Its record of the machine is left out too: it starts git, which complains outside of a repository, and a dozen other
    programs, and nothing of it is read here.
    """
    import datasets
    import lm_eval.api.task
    import lm_eval.evaluator
    from tqdm import tqdm

    replaced = [
        (lm_eval.api.task, "tqdm", partial(tqdm, disable=True)),
        (lm_eval.evaluator, "get_git_commit_hash", lambda: None),
        (lm_eval.evaluator, "add_env_info", lambda results: None),
    ]
    # Names that another version of the harness does not have would only be noise.
    restored = [(module, name, getattr(module, name)) for module, name, _ in replaced if hasattr(module, name)]
    log = logging.getLogger("lm_eval")
    level, bars_hidden = log.level, datasets.are_progress_bars_disabled()
    log.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in restored:
            setattr(module, name, value)
        log.setLevel(level)
        if not bars_hidden:
            datasets.enable_progress_bars()
