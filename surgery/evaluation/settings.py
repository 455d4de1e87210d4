"""What a user can ask of an evaluation, with the defaults in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import FileSettings, did_you_mean, whole_number
from surgery.evaluation.kinds import DEFAULT, TASKS

BUILTIN = "builtin"
NO_VARIANTS = "none"
HARNESS = "lm-eval:"
HELD_OUT_SETS = ("prose", "code", "chat")
"""Held-out text of what is installed, and the first model's own conversations."""
VARIANTS = ("int8", "fp8", "int4", "int2", "mean-pool", "window")
DOMAINS = ("auto", "code", "text")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DECODED = 128
TUPLES = (
    "tasks",
    "data",
    "variants",
    "needle_lengths",
    "needle_depths",
    "ruler_lengths",
    "ruler_tasks",
    "repeat_lags",
    "prompts",
    "contexts",
    "batches",
)


@dataclass(frozen=True)
class EvalSettings(FileSettings):
    """Settings of ``surgery eval``; configs/eval.yaml holds the same with comments.

    Attributes:
        tasks: what to measure besides KV bytes, which every row has: names of surgery.evaluation.kinds, DEFAULT
            ones for "all", and lm-eval:<task>.
        data: held-out texts, each builtin, one of HELD_OUT_SETS, a file or a dataset's name; the loss is told apart by
            them.
        text_field: column that holds the text.
        windows, length: held-out windows and tokens in each; the latter also of recall prompts and of the KV bytes.
        decoded: tokens at the end of each window that are decoded one by one for the through-cache loss; 0 for no such
            loss, None for 128, or half of a shorter window.
        recall_prompts: prompts with planted keys.
        domain: what needle and ruler prompts are made of; auto is code for the builtin text, otherwise text.
        needle_lengths, needle_depths, needle_trials: the grid in tokens and percent, prompts in each cell; no lengths
            means a quarter of, a half of, just and one and a half times the model's limit.
        ruler_lengths, ruler_samples, ruler_tasks: lengths in tokens (none: the length above), samples of each task at
            each length, names of tasks (none: all 13).
        ruler_floor: share of 1 that the baseline has to score in a task at a length to count for the second average.
        repeat_lags, repeat_rows: distances after which a span of text comes again (none: 256, doubled up to 8192, as
            far as the model's limit and the text go), and rows of each.
        match_prompts, match_tokens: held-out windows whose first halves are continued greedily, and tokens to write.
        prompts, new_tokens: texts to complete (none: openings of held-out windows), and tokens to write.
        contexts, batches: of memory and speed (no contexts: up to the model's limit).
        variants: cheaper forms of the baseline to measure beside it, at the checkpoints' KV ratios.
        lm_eval_include, num_fewshot: folder of user tasks for lm-evaluation-harness, and its few-shot count.
        seed: of every random choice.
        limit: samples a task at most, for a quick look; the report is marked.
        device: "auto" is a CUDA device if there is one, otherwise the CPU.
        dtype: what quality is measured in; "auto" is the checkpoint's own on an accelerator and float32 on a CPU.
            Bytes and speed are always those of the checkpoint's own dtype.
        wandb, wandb_mode: project to log to, and online or offline.
    """

    tasks: tuple[str, ...] = ("loss", "recall")
    data: tuple[str, ...] = (BUILTIN,)
    text_field: str = "text"
    windows: int = 24
    length: int = 1024
    decoded: int | None = None
    recall_prompts: int = 48
    domain: str = "auto"
    needle_lengths: tuple[int, ...] = ()
    needle_depths: tuple[int, ...] = (0, 25, 50, 75, 100)
    needle_trials: int = 4
    ruler_lengths: tuple[int, ...] = ()
    ruler_samples: int = 50
    ruler_tasks: tuple[str, ...] = ()
    ruler_floor: float = 0.3
    repeat_lags: tuple[int, ...] = ()
    repeat_rows: int = 16
    match_prompts: int = 16
    match_tokens: int = 64
    prompts: tuple[str, ...] = ()
    new_tokens: int = 48
    contexts: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1, 4)
    variants: tuple[str, ...] = ("int8", "int4", "mean-pool", "window")
    lm_eval_include: str | None = None
    num_fewshot: int | None = None
    seed: int = 0
    limit: int | None = None
    batch_size: int = 8
    device: str = "auto"
    dtype: str = "auto"
    wandb: str | None = None
    wandb_mode: str = "online"

    def __post_init__(self) -> None:
        for name in TUPLES:
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        if "all" in self.tasks:
            others = tuple(task for task in self.tasks if task != "all" and task not in DEFAULT)
            object.__setattr__(self, "tasks", (*DEFAULT, *others))
        for task in self.tasks:
            if task not in TASKS and not (task.startswith(HARNESS) and task != HARNESS):
                known = [*TASKS, f"{HARNESS}<task>"]
                raise SurgeryError(f"unknown task {task!r}: choose of {', '.join(known)}{did_you_mean(task, known)}")
        if self.variants == (NO_VARIANTS,):
            object.__setattr__(self, "variants", ())
        for name, allowed in (("variants", VARIANTS), ("domain", DOMAINS), ("dtype", DTYPES)):
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                if value not in allowed:
                    raise SurgeryError(f"{name} {value!r} is unknown: choose {', '.join(allowed)}")
        if self.wandb_mode not in ("online", "offline"):
            raise SurgeryError(f"wandb mode {self.wandb_mode!r} is unknown: choose online or offline")
        if not self.data:
            raise SurgeryError("no held-out text: give builtin, a file or a dataset")
        self._check_numbers()

    def _check_numbers(self) -> None:
        at_least_one = ("windows", "recall_prompts", "needle_trials", "ruler_samples", "new_tokens", "batch_size")
        at_least_one += ("repeat_rows", "match_prompts", "match_tokens")
        for name in (*at_least_one, "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SurgeryError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.ruler_floor <= 1:
            raise SurgeryError(f"ruler_floor {self.ruler_floor}: a score lies between 0 and 1")
        for name in ("needle_lengths", "ruler_lengths", "repeat_lags", "contexts", "batches"):
            if any(value < 1 for value in getattr(self, name)):
                raise SurgeryError(f"{name} must be positive, not {', '.join(map(str, getattr(self, name)))}")
        if any(not 0 <= depth <= 100 for depth in self.needle_depths) or not self.needle_depths:
            raise SurgeryError("needle_depths are percent of the context, from 0 to 100, at least one")
        if self.length < 4:
            raise SurgeryError(f"length must be at least 4 tokens, not {self.length}")
        if self.decoded is None:
            object.__setattr__(self, "decoded", min(DECODED, self.length // 2))
        if self.decoded and not 1 <= self.decoded <= self.length - 2:
            raise SurgeryError(f"decoded must be 0 or at most length - 2 = {self.length - 2}, not {self.decoded}")


def _as_tuple(name: str, value: Any) -> tuple:
    """A list of a YAML file or the command line; a single value is a list of one, a string is cut at commas."""
    if isinstance(value, str) and name != "prompts":
        value = [part.strip() for part in value.split(",") if part.strip()]
    items = tuple(value) if isinstance(value, list | tuple) else (value,)
    if name in ("tasks", "data", "variants", "ruler_tasks", "prompts"):
        return tuple(dict.fromkeys(map(str, items)))
    try:
        return tuple(dict.fromkeys(map(whole_number, items)))
    except (TypeError, ValueError):
        raise SurgeryError(f"{name} must be whole numbers, not {', '.join(map(str, items))}") from None
