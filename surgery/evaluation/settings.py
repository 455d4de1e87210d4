"""Settings of an evaluation and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import FileSettings
from surgery.common.removed import removal
from surgery.common.setting import DTYPE_NAMES, did_you_mean, setting, settings_of
from surgery.evaluation.kinds import DEFAULT, TASKS

Variant = Literal[
    "int8",
    "int4",
    "int3",
    "int2",
    "window",
    "fp8",
    "fp8_per_token_head",
    "int8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
    "q8_0",
    "q5_0",
    "q4_0",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "kvarn_k4v4_g128",
    "kvarn_k4v2_g128",
    "kvarn_k4v2_g64",
    "oscar_int2",
]
NO_VARIANTS = "none"
HARNESS = "lm-eval:"
DECODED = 128


@dataclass(frozen=True)
class EvalSettings(FileSettings):
    """Settings of ``surgery eval``."""

    tasks: tuple[str, ...] = setting(
        ("loss", "recall"),
        "loss, recall, needle, generate, speed, or all of these; lm-eval:TASK. KV bytes are always measured.",
        section="Tasks",
    )
    variants: tuple[Variant, ...] = setting(
        ("int8", "int4", "int4_per_token_head", "window"),
        "Cheap baselines to measure too: cache formats by the engine's name for them, KIVI's (int8, int4, int3, "
        "int2), and at the checkpoints' KV ratios window.",
        metavar="A,B|none",
    )
    limit: int | None = setting(None, "Maximum samples per task, for a quick look; marks the report.", least=1)
    data: tuple[str, ...] = setting(
        (),
        "Held-out text, more than once for several; losses are also given for each; none: builtin for a model of code "
        "such as the demo's, prose and code for others.",
        more="builtin: standard-library source that ships and that no calibration text holds. prose, code: what "
        "installed packages say of themselves, the source of torch and transformers. Or .txt, .jsonl, .json or "
        ".parquet files, names of datasets (name or name:config:split).",
        section="Data",
        metavar="FILE|DATASET|NAME",
        old=("--text", "--calibration"),
        repeated=True,
    )
    text_field: str = setting("text", "Column that holds the text.", metavar="NAME", advanced=True)
    windows: int = setting(24, "Held-out windows.", least=1)
    length: int = setting(1024, "Tokens per window and per recall prompt.")
    kv_context: int | None = setting(
        None,
        "Tokens at which KV bytes are counted in a live cache, in the checkpoint's own dtype.",
        more="A CPU without half-precision arithmetic takes hours at long contexts; shares at these are by formula.",
        unset="as length",
        least=2,
        advanced=True,
    )
    decoded: int | None = setting(
        None,
        "Tokens at the end of each window that are decoded one by one, for the loss through the live cache; 0: none.",
        unset="128, or half of a shorter window",
        advanced=True,
    )
    recall_prompts: int = setting(48, "Prompts with planted keys.", least=1)
    domain: Literal["auto", "code", "text"] = setting(
        "auto",
        "What needle prompts are made of: auto is code for builtin data, otherwise text.",
        advanced=True,
    )
    needle_lengths: tuple[int, ...] = setting(
        (),
        "Tokens of needle prompts, and of RULER's in lm-eval; none: 1/4, 1/2, 1 and 1.5 times the model's limit, and "
        "4096 for RULER.",
        least=1,
        advanced=True,
    )
    needle_depths: tuple[int, ...] = setting((0, 25, 50, 75, 100), "Depths of needles, in percent.", advanced=True)
    needle_trials: int = setting(4, "Prompts of each length and depth.", least=1, advanced=True)
    prompts: tuple[str, ...] = setting(
        (),
        "Text to complete, more than once for several; none: openings of held-out windows.",
        metavar="TEXT",
        flag="prompt",
        repeated=True,
        advanced=True,
    )
    new_tokens: int = setting(48, "Tokens to write after each prompt.", least=1, advanced=True)
    contexts: tuple[int, ...] = setting(
        (),
        "Tokens in the cache, in task speed; none: the model's limit, at most 32k, and halves of it.",
        least=1,
        advanced=True,
    )
    batches: tuple[int, ...] = setting((1, 4), "Sequences at a time, in task speed.", least=1, advanced=True)
    lm_eval_include: str | None = setting(None, "Folder of your own lm-eval tasks.", metavar="DIR", advanced=True)
    num_fewshot: int | None = setting(
        None, "Few-shot examples of lm-eval tasks.", unset="the task's own number", advanced=True
    )
    seed: int = setting(0, "Seed of every random choice.", advanced=True)
    batch_size: int = setting(8, "Sequences at a time.", least=1, section="Machine")
    device: str = setting("auto", "Where models run: cpu, cuda, cuda:1 …; auto is cuda if available.", metavar="NAME")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = setting(
        "auto",
        "Dtype for quality: auto is the checkpoint's, float32 on a CPU; fp32 is the same as float32. Bytes and "
        "speed are the checkpoint's own.",
        synonyms=DTYPE_NAMES,
    )
    wandb: str | None = setting(None, "Log to wandb, one run per model.", section="Output", metavar="PROJECT")
    wandb_mode: Literal["online", "offline"] = setting("online", "How wandb logs.", advanced=True)

    def __post_init__(self) -> None:
        if self.variants in (NO_VARIANTS, (NO_VARIANTS,), [NO_VARIANTS]):
            object.__setattr__(self, "variants", ())
        super().__post_init__()
        for name in (name for name, each in settings_of(type(self)).items() if each.many):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        if "all" in self.tasks:
            others = tuple(task for task in self.tasks if task != "all" and task not in DEFAULT)
            object.__setattr__(self, "tasks", (*DEFAULT, *others))
        for task in self.tasks:
            if task not in TASKS and not (task.startswith(HARNESS) and task != HARNESS):
                if notice := removal(f"tasks {task}"):
                    raise SurgeryError(f"task {task} {notice}")
                choices = [*TASKS, f"{HARNESS}<task>"]
                raise SurgeryError(
                    f"unknown task {task!r}: choose of {', '.join(choices)}{did_you_mean(task, choices)}"
                )
        for name in self.data:
            if notice := removal(f"data {name}"):
                raise SurgeryError(f"data {name} {notice}", setting="data", hint=notice)
        if any(not 0 <= depth <= 100 for depth in self.needle_depths) or not self.needle_depths:
            raise SurgeryError(
                "needle_depths are percent of the context, from 0 to 100, at least one", setting="needle_depths"
            )
        if self.length < 4:
            raise SurgeryError(f"length must be at least 4 tokens, not {self.length}", setting="length")
        if self.decoded is None:
            object.__setattr__(self, "decoded", min(DECODED, self.length // 2))
        if self.decoded and not 1 <= self.decoded <= self.length - 2:
            raise SurgeryError(
                f"decoded must be 0 or at most length - 2 = {self.length - 2}, not {self.decoded}", setting="decoded"
            )

    def quality_dtype(self, device: str) -> str:
        """Return the dtype of quality measurements; "auto" is float32 on CPUs: half precision is slow and differs."""
        return "float32" if self.dtype == "auto" and device == "cpu" else self.dtype
