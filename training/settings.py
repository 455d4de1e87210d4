"""Settings of healing, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any, Literal

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import FileSettings
from surgery.common.removed import removal
from surgery.common.setting import DTYPE_NAMES, did_you_mean, setting

BUILTIN = "builtin"
FEWEST_STEPS, MOST_ROWS, MOST_AT_ONCE = 200, 16, 4
"""Least number of steps in a token budget; most sequences of a process in a step, and in a batch.

Few large and many small steps were compared on the demo model; SmolLM2 was healed with small ones (docs/healing.md).
"""
LEARNED_FROM = ("teacher", "teacher_logits", "objective")
"""Settings of the teacher signal. If none is set, `surgery heal` distills from the student's recorded source."""

SHORT_DTYPES = {name: short for short, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class ObjectiveWeights(FileSettings):
    """Weights of the losses; a loss of weight 0 is not computed.

    Attributes:
        hidden: weight of `distillation.matching_loss` on the outputs of layers.
        layerwise: the same on attention outputs, each on its teacher's input (CSKV, arXiv:2409.10593); excludes others.

    Raises SurgeryError: a value is out of range, all weights are 0, or layerwise is combined with other losses.
    """

    kl: float = 1.0
    cross_entropy: float = 0.0
    hidden: float = 0.0
    layerwise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in LOSSES:
            weight = getattr(self, name)
            if not (isfinite(weight) and weight >= 0):
                raise SurgeryError(f"objective {name}: weight must be a finite number >= 0, not {weight!r}")
        if not self.parts():
            raise SurgeryError(f"all objective weights are 0: set one of {', '.join(LOSSES)} above 0")
        if self.layerwise and len(self.parts()) > 1:
            raise SurgeryError("objective layerwise excludes other losses: train them in a second stage")

    def parts(self) -> list[str]:
        """Return the names of the losses with nonzero weights."""
        return [name for name in LOSSES if getattr(self, name)]


LOSSES = tuple(each.name for each in fields(ObjectiveWeights))


@dataclass(frozen=True)
class HealSettings(FileSettings):
    """Settings of ``surgery heal`` and of the training processes that it starts."""

    student: str = setting("", "The converted checkpoint, a folder or a hub id.", section="Models", in_file=True)
    teacher: str | None = setting(
        None,
        "Model to distill from; builtin is the demo model.",
        unset="the source in the student's report, if teacher_logits and objective are unset too",
        metavar="SRC|builtin|smollm2",
    )
    teacher_logits: str | None = setting(
        None,
        "Folder of the teacher's top-k logits.",
        more="With a teacher, missing logits are written before training, and the teacher is then unloaded; without "
        "one the folder must be complete.",
        metavar="DIR",
        advanced=True,
    )
    teacher_top_k: int = setting(64, "Number of top logits stored per position.", least=1, advanced=True)
    out: str = setting(
        "", "Folder of the healed checkpoint.", more="The state for resuming is in OUT.run next to it.", in_file=True
    )
    data: tuple[str | dict[str, Any], ...] = setting(
        (BUILTIN,),
        "Text to train on, more than once for several; builtin is prose=0.7 and code=0.3 of the standard library, code "
        "alone for a tokenizer of less than 8,192 tokens.",
        more="Or prose, code, docstrings (of installed packages), a .txt, .jsonl or .parquet file, the name of a "
        "dataset; in a file also mappings with source, weight, format, text_field and tokens.",
        section="Data",
        metavar="FILE|DATASET|builtin",
        old=("--text", "--calibration"),
        repeated=True,
    )
    recall: float = setting(
        0.25,
        "Share of the sequences with planted facts and questions about them.",
        more="Without them models forget to retrieve.",
        least=0,
        most=1,
        advanced=True,
    )
    length: int = setting(1024, "Tokens per sequence.")
    held_out: int = setting(
        16, "Sequences kept from training for the held-out loss; 0 for none.", least=0, advanced=True
    )
    train: Literal["all", "attention", "lora"] = setting(
        "attention", "Parameters to train: attention, low-rank adapters of it (lora), or all.", section="What trains"
    )
    lora_rank: int = setting(16, "Rank of the adapters.", least=1, advanced=True)
    lora_alpha: float = setting(
        32.0, "Alpha of the adapters, whose update is scaled by alpha / rank.", above=0, advanced=True
    )
    entry_factors: str | None = setting(
        None,
        "JSON file of learning-rate multipliers for elements that move less, or not at all.",
        metavar="FILE",
        advanced=True,
    )
    objective: dict[str, float] = setting(
        factory=dict,
        help="Weights of kl, cross_entropy and hidden.",
        more="Or layerwise alone: each attention module against the teacher's on the same input, as a stage before one "
        "with the others. Empty: kl 1, or cross_entropy 1 without a teacher.",
        section="Objective",
        in_file=True,
    )
    nested_ranks: tuple[float, ...] = setting(
        (),
        "Shares of the latent rank, including 1.0, one of which each step draws, so that slices of the result are good "
        "models too.",
        more="As in MatryoshkaKV. Held-out losses are measured at every share.",
        kind="shares such as [1.0, 0.5, 0.25]",
        metavar="F,F",
        advanced=True,
    )
    batch_size: int | None = setting(
        None,
        "Sequences per process in a batch.",
        least=1,
        unset="as many as leave 200 steps in max_tokens, at most 4",
        more="On a CPU with max_seconds: 1.",
        section="Steps",
    )
    gradient_accumulation: int | None = setting(
        None,
        "Batches per process in an optimizer step.",
        least=1,
        unset="as many as leave 200 steps in max_tokens, at most 16 sequences per process",
        advanced=True,
    )
    learning_rate: float = setting(1e-4, "Peak learning rate of AdamW.", above=0)
    schedule: Literal["cosine", "linear", "constant"] = setting(
        "cosine", "Decay of the learning rate after the warm-up.", advanced=True
    )
    warmup: float = setting(
        0.05, "Share of the budget over which the learning rate rises from 0.", least=0, most=1, advanced=True
    )
    betas: tuple[float, ...] = setting((0.9, 0.95), "Betas of AdamW.", kind="two numbers", metavar="F,F", advanced=True)
    clip: float | None = setting(1.0, "Maximum norm of the gradient.", above=0, unset="no limit", advanced=True)
    max_tokens: int | None = setting(
        10_000_000,
        "Stop after this many tokens.",
        more="The limit that is reached first ends the run, and the schedule spans it.",
        least=1,
        section="Budget",
    )
    max_seconds: float | None = setting(
        None,
        "Stop after this many seconds.",
        more="Training time over all resumed runs, without loading and evaluation.",
        above=0,
        flag="max_time",
        metavar="SECONDS",
    )
    max_steps: int | None = setting(None, "Stop after this many steps.", least=1)
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = setting(
        "auto",
        "Compute dtype: auto is bf16 on a GPU that supports it, fp32 elsewhere; float32 is the same as fp32.",
        more="Trainable weights are always fp32.",
        section="Machine",
        synonyms=SHORT_DTYPES,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Device to train on; auto is accelerate's choice.", advanced=True
    )
    gradient_checkpointing: bool = setting(
        False, "Recompute activations in the backward pass, from each layer's input.", advanced=True
    )
    shard_teacher: bool = setting(False, "Under FSDP2, shard the teacher's layers too.", advanced=True)
    trust_remote_code: bool = setting(False, "Run model code that comes with the checkpoints.", advanced=True)
    seed: int = setting(0, "Seed of the data order and of all other random choices.", advanced=True)
    eval_every: int | None = setting(
        100,
        "Steps between held-out losses.",
        more="Also measured at the start and the end.",
        least=1,
        unset="at the start and the end only",
        section="Evaluation during training",
        advanced=True,
    )
    save_every: int | None = setting(
        200, "Steps between checkpoints.", least=1, unset="no limit", section="Checkpoints", advanced=True
    )
    save_seconds: float | None = setting(
        600.0, "Seconds between checkpoints, if that comes first.", above=0, unset="no limit", advanced=True
    )
    keep_last: int = setting(2, "Number of checkpoints to keep.", least=1, advanced=True)
    overwrite: bool = setting(False, "Replace out if it exists.", in_file=True)
    wandb: str | None = setting(None, "Log to wandb.", section="Output", metavar="PROJECT")
    wandb_mode: Literal["online", "offline", "disabled"] = setting("online", "How wandb logs.", advanced=True)
    tracker_folder: str | None = setting(
        None,
        "Folder for wandb's files.",
        unset="OUT.tracking; OUT.run if training is launched directly",
        metavar="DIR",
        advanced=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise SurgeryError(f"betas must be two numbers from 0 to below 1, not {self.betas!r}", setting="betas")
        shares = tuple(sorted(self.nested_ranks, reverse=True))
        if shares and not (shares[-1] > 0 and shares[0] == 1 and len(set(shares)) == len(shares)):
            raise SurgeryError(
                "nested_ranks must be distinct shares in (0, 1] that include 1, such as [1.0, 0.5, 0.25]; not"
                f" {self.nested_ranks!r}",
                setting="nested_ranks",
            )
        object.__setattr__(self, "nested_ranks", shares)
        if self.length < 2:
            raise SurgeryError(
                "length must be at least 2, since each token is predicted from those before it", setting="length"
            )
        self._check_combinations()
        self._check_objective()

    def weights(self) -> ObjectiveWeights:
        """Return the objective's weights; the default is forward KL alone, or cross-entropy without a teacher.

        Raises SurgeryError: a weight is invalid.
        """
        objective = self.objective or ({"kl": 1.0} if self.has_teacher else {"cross_entropy": 1.0})
        # An objective is complete: losses that it does not name have weight 0, not their default.
        return ObjectiveWeights(**{"kl": 0.0, **objective})

    @property
    def has_teacher(self) -> bool:
        """Return whether there is a teacher, or its logits, to distill from."""
        return self.teacher is not None or self.teacher_logits is not None

    def _check_combinations(self) -> None:
        self._check_removed()
        endless = self.max_tokens is self.max_steps is None
        problems = [
            (endless and self.max_seconds is None, "no limit ends the run: set max_tokens, max_seconds or max_steps"),
            (not self.data, "data is empty: set builtin, a file or a dataset"),
            (
                self.teacher_logits is not None and endless,
                "teacher_logits needs a fixed number of sequences: set max_tokens or max_steps",
            ),
        ]
        for is_wrong, problem in problems:
            if is_wrong:
                raise SurgeryError(problem)

    def _check_removed(self) -> None:
        """Raise SurgeryError if an entry of `data` uses a name that was removed."""
        for entry in self.data:
            keys, source = (entry, entry.get("source")) if isinstance(entry, dict) else ((), entry)
            for name in (*keys, f"data {source}"):
                if reason := removal(name) or removal(f"data {name}"):
                    raise SurgeryError(f"{name} {reason}")

    def _check_objective(self) -> None:
        if not isinstance(self.objective, dict):
            raise SurgeryError(f"objective must map losses to weights, not be {self.objective!r}", setting="objective")
        for name in self.objective:
            if name not in LOSSES:
                reason = removal(f"objective {name}") or f"unknown{did_you_mean(str(name), list(LOSSES))}"
                raise SurgeryError(f"objective: {name} {reason}", setting="objective")
        matched = [name for name in ("hidden", "layerwise") if self.objective.get(name)]
        distilled = matched + ["kl"] * bool(self.objective.get("kl"))
        if distilled and not self.has_teacher:
            raise SurgeryError(
                f"objective {distilled[0]} needs a teacher: set teacher, or use cross_entropy", setting="objective"
            )
        self.weights()
        if matched and (self.teacher is None or self.teacher_logits is not None):
            raise SurgeryError(
                f"objective {matched[0]} needs the teacher's layers: set teacher, without teacher_logits",
                setting="objective",
            )
        if self.objective.get("layerwise") and (self.train == "all" or self.gradient_checkpointing):
            raise SurgeryError(
                'objective layerwise does not support train "all" or gradient_checkpointing: set train to attention, '
                "gradient_checkpointing to false",
                setting="objective",
            )

    def check_complete(self) -> None:
        """Raise SurgeryError if the student or the output folder is missing."""
        for name in ("student", "out"):
            if not getattr(self, name):
                raise SurgeryError(f"{name} is missing: set it in the settings file")

    def with_batches(self, processes: int) -> HealSettings:
        """Return these settings with batch size and gradient accumulation filled in.

        Short runs improve with the number of steps (docs/healing.md), so the batch shrinks with the token budget.
        """
        if None not in (self.batch_size, self.gradient_accumulation):
            return self
        rows = MOST_ROWS
        if self.max_tokens is not None:
            rows = max(1, min(rows, self.max_tokens // (FEWEST_STEPS * self.length * processes)))
        if self.max_seconds is not None and not self.on_gpu():
            rows = 1
        batch_size = self.batch_size or min(MOST_AT_ONCE, max(1, rows // (self.gradient_accumulation or 1)))
        accumulated = self.gradient_accumulation or max(1, rows // batch_size)
        return replace(self, batch_size=batch_size, gradient_accumulation=accumulated)

    def on_gpu(self) -> bool:
        """Return whether training on this machine uses a GPU."""
        import torch

        return self.device != "cpu" and torch.cuda.is_available()

    def most_steps(self, processes: int) -> int | None:
        """Return the number of steps within the token and step budgets; None if only time limits the run."""
        tokens = self.global_batch(processes) * self.length
        by_tokens = None if self.max_tokens is None else -(-self.max_tokens // tokens)
        return min((limit for limit in (self.max_steps, by_tokens) if limit is not None), default=None)

    def global_batch(self, processes: int) -> int:
        """Return the number of sequences of one step over all processes."""
        settings = self.with_batches(processes)
        return settings.batch_size * settings.gradient_accumulation * processes
