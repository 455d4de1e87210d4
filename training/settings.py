"""What a user can ask of a healing, with the defaults in one place."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import FileSettings, did_you_mean

if TYPE_CHECKING:
    from surgery.training.objectives import ObjectiveWeights

BUILTIN = "builtin"
TRAIN = ("all", "attention", "new", "lora")
SCHEDULES = ("cosine", "linear", "constant")
DTYPES = ("auto", "fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu")
ATTENTION = ("auto", "model", "surgery")
WANDB_MODES = ("online", "offline", "disabled")
NO_TRACKER = "none"
EVALUATIONS = ("loss", "recall", "needle", "ruler")
"""Tasks of `surgery eval` that a run can take on the way."""

EVALUATING = ("evaluate_every", "evaluate_limit")

LEARNED_FROM = ("teacher", "teacher_logits", "objective")
"""Settings that say what is learned from; where none is given, `surgery heal` takes the student's recorded source."""

TUPLES = ("data", "train_patterns", "lora_modules", "evaluate_tasks", "evaluate_data")
LOSSES = ("kl", "reverse_kl", "jsd", "cross_entropy", "hidden", "attention", "layerwise")
SHAPES = ("jsd_beta", "temperature")
"""Names in an objective: weights of losses, and what shapes them."""
NUMBERS = ("learning_rate", "warmup", "final_learning_rate", "weight_decay", "clip", "max_seconds", "spike", "recall")


@dataclass(frozen=True)
class HealSettings(FileSettings):
    """Settings of a healing; configs/heal.yaml holds the same with comments.

    Attributes:
        student: the converted checkpoint, a folder or a hub id.
        teacher: its source, likewise; None trains on what needs no teacher, cross-entropy or cached logits.
        teacher_logits: folder of the teacher's top logits. With a teacher they are written there before the training,
            where they are not yet, and the teacher leaves the memory; without one they must be there.
        teacher_top_k: tokens of each position whose logits are kept there.
        out: folder of the healed checkpoint. What a resumed run needs lies in `<out>.run` beside it.
        data: texts to train on, each a name (builtin, a file, a dataset) or a mapping with the fields of
            `surgery.training.sources.TextSource`: source, weight and so on.
        recall: share of the sequences that carry planted facts with questions.
        length: tokens of a sequence.
        held_out: sequences that are never trained on, for the held-out loss; 0 for none.
        train: what trains: "all", "attention" (whole attention modules), "new" (parameters that the teacher has not
            under that name and shape) or "lora" (low-rank adapters on linear modules).
        train_patterns: names of parameters, with * and ?, that train besides.
        balanced: first rescale latents whose two sides train, so that entries of both have one size; the student
            computes what it did, bit for bit.
        lora_rank, lora_alpha: of the adapters; the update counts alpha / rank.
        lora_modules: names of the modules that get adapters, with * and ?; none means the attentions' linear ones.
        entry_factors: JSON file of entries that must not move, or move less (`entry_factors.factors_of`), or None.
        objective: weights of the losses, by name (`surgery.training.objectives.ObjectiveWeights`).
        nested_ranks: shares of the student's latents, 1 among them, of which every step draws how many count, so that
            slices of the result are good models too (`surgery.training.nested`); none draws nothing. Held-out losses
            are taken of every share.
        orthogonal: take factors of latents back to orthonormal columns after every step of nested ranks
            (`surgery.training.orthogonal`).
        batch_size: sequences a process computes at once.
        gradient_accumulation: batches of each process in one step.
        learning_rate: peak, of AdamW.
        schedule: of the learning rate after the warm-up: "cosine" or "linear" down to the end, or "constant".
        warmup: share of the budget over which the learning rate rises from 0.
        final_learning_rate: what it falls to, as a share of the peak.
        weight_decay: of matrices; vectors, norms and biases have none.
        betas: of AdamW.
        clip: largest norm of a step's gradient; None does not clip.
        max_tokens, max_seconds, max_steps: the budget; whichever is used up first ends the run, and the schedule runs
            over it. Seconds are those of training over all resumed runs, without loading and without measuring: neither
            held-out losses nor evaluations take of them.
        attention: function of it: "surgery", the kernel of this project for keys and values of any widths; "model", as
            the model is loaded; or "auto": on a CPU PyTorch's fused kernel for any widths, on a GPU the model's.
        dtype: what is computed in; weights that train are fp32 whatever it is. "auto" is bf16 on an accelerator that
            can, and fp32 elsewhere.
        device: "auto" is what accelerate finds, "cpu" keeps off accelerators.
        gradient_checkpointing: keep only each layer's input for the backward pass and compute the rest again.
        compile: run the student's layers through torch.compile.
        quantization_aware: where the student keeps its cache quantised, train on what its codes say, with gradients as
            if that were the exact numbers; others are trained the same either way.
        shard_teacher: under FSDP2, shard the teacher's layers too.
        trust_remote_code: run model code that comes with the checkpoints.
        seed: of the order of the data and everything else that is random.
        eval_every: steps between measurements of the held-out loss; it is also measured at the start and the end.
        patience: measurements in a row without a better held-out loss after which to stop; the best state is then
            what is written. None never stops for that.
        spike: stop when a loss is above so many times the median of the last ones; None only stops for nan and inf.
        evaluate_every: steps between evaluations of the student as it is by then, taken at the start and the end too;
            None for none.
        evaluate_tasks: of them, as `surgery eval` calls them: loss, recall, needle, ruler.
        evaluate_data: held-out texts for them: builtin, files, datasets.
        evaluate_limit: samples a task at most, as `--limit` there; None for as many as there by default.
        save_every, save_seconds: steps and seconds between checkpoints, whichever comes first; None for no such rule.
        keep_last: checkpoints that are kept.
        resume: go on from the last good checkpoint, if there is one; otherwise what an earlier run left is removed.
        overwrite: replace `out` if it exists.
        log_every: steps between lines on the screen; the log file has every step.
        tracker: "none" or any that accelerate knows: wandb, tensorboard, mlflow...
        wandb_mode, project: of the tracker: online, offline or disabled, and the project's name.
        tracker_folder: where a tracker that writes files does; None for `<out>.run`.
    """

    student: str = ""
    teacher: str | None = None
    teacher_logits: str | None = None
    teacher_top_k: int = 64
    out: str = ""
    data: tuple[str | dict[str, Any], ...] = (BUILTIN,)
    recall: float = 0.25
    length: int = 1024
    held_out: int = 16
    train: str = "attention"
    train_patterns: tuple[str, ...] = ()
    balanced: bool = True
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_modules: tuple[str, ...] = ()
    entry_factors: str | None = None
    objective: dict[str, float] = field(default_factory=dict)
    nested_ranks: tuple[float, ...] = ()
    orthogonal: bool = False
    batch_size: int = 4
    gradient_accumulation: int = 4
    learning_rate: float = 1e-4
    schedule: str = "cosine"
    warmup: float = 0.05
    final_learning_rate: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = 1.0
    max_tokens: int | None = 10_000_000
    max_seconds: float | None = None
    max_steps: int | None = None
    attention: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False
    quantization_aware: bool = True
    shard_teacher: bool = False
    trust_remote_code: bool = False
    seed: int = 0
    eval_every: int | None = 100
    patience: int | None = None
    spike: float | None = 5.0
    evaluate_every: int | None = None
    evaluate_tasks: tuple[str, ...] = ("loss", "recall")
    evaluate_data: tuple[str, ...] = (BUILTIN,)
    evaluate_limit: int | None = None
    save_every: int | None = 200
    save_seconds: float | None = 600.0
    keep_last: int = 2
    resume: bool = True
    overwrite: bool = False
    log_every: int = 10
    tracker: str = NO_TRACKER
    wandb_mode: str = "online"
    project: str = "surgery-heal"
    tracker_folder: str | None = None

    def __post_init__(self) -> None:
        for name in TUPLES:
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str | dict) else tuple(value or ()))
        object.__setattr__(self, "betas", self._betas())
        object.__setattr__(self, "nested_ranks", self._nested_ranks())
        for name in NUMBERS:
            object.__setattr__(self, name, _as_float(name, getattr(self, name)))
        for name, allowed in (("train", TRAIN), ("schedule", SCHEDULES), ("dtype", DTYPES), ("device", DEVICES)):
            _choose(name, getattr(self, name), allowed)
        _choose("attention", self.attention, ATTENTION)
        _choose("wandb_mode", self.wandb_mode, WANDB_MODES)
        for task in self.evaluate_tasks:
            _choose("evaluate_tasks", task, EVALUATIONS)
        self._check_numbers()
        self._check_together()
        self._check_nested()
        self._check_objective()

    def weights(self) -> ObjectiveWeights:
        """The objective as the losses take it; the default is forward KL alone, cross-entropy without a teacher.

        Raises:
            SurgeryError: a weight is not allowed.
        """
        from surgery.training.objectives import ObjectiveWeights

        given = self.objective or ({"kl": 1.0} if self.has_teacher else {"cross_entropy": 1.0})
        # Named losses are all there are: a default that nobody asked for would be a surprise.
        return ObjectiveWeights(**{**dict.fromkeys(LOSSES, 0.0), **given})

    @property
    def has_teacher(self) -> bool:
        """Whether there is something to distil from."""
        return self.teacher is not None or self.teacher_logits is not None

    def _betas(self) -> tuple[float, float]:
        try:
            first, second = (float(value) for value in self.betas)
        except (TypeError, ValueError):
            raise SurgeryError(f"betas must be two numbers, not {self.betas!r}") from None
        if not (0 <= first < 1 and 0 <= second < 1):
            raise SurgeryError(f"betas must be two numbers from 0 to below 1, not {self.betas!r}")
        return first, second

    def _nested_ranks(self) -> tuple[float, ...]:
        given = self.nested_ranks or ()
        try:
            shares = sorted(map(float, given), reverse=True)
        except (TypeError, ValueError):
            raise SurgeryError(f"nested_ranks must be shares such as [1.0, 0.5, 0.25], not {given!r}") from None
        if shares and not (shares[-1] > 0 and shares[0] == 1 and len(set(shares)) == len(shares)):
            raise SurgeryError(
                f"nested_ranks must be different shares from above 0 to 1, with 1 among them, not {given!r}"
            )
        return tuple(shares)

    def _check_numbers(self) -> None:
        whole = (
            "length",
            "lora_rank",
            "batch_size",
            "gradient_accumulation",
            "keep_last",
            "log_every",
            "teacher_top_k",
        )
        for name in (*whole, "max_tokens", "max_steps", "eval_every", "patience", "save_every", *EVALUATING):
            value = getattr(self, name)
            if value is None and name not in whole:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SurgeryError(f"{name} must be a whole number of at least 1, not {value!r}")
        if not isinstance(self.held_out, int) or self.held_out < 0:
            raise SurgeryError(f"held_out must be a whole number of at least 0, not {self.held_out!r}")
        if self.length < 2:
            raise SurgeryError("length must be at least 2: a token can only be predicted from one before it")
        for name in ("learning_rate", "clip", "max_seconds", "save_seconds", "lora_alpha"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SurgeryError(f"{name} must be above 0, not {value!r}")
        for name in ("warmup", "final_learning_rate", "recall"):
            if not 0 <= getattr(self, name) <= 1:
                raise SurgeryError(f"{name} is a share: it must be from 0 to 1, not {getattr(self, name)!r}")
        if self.weight_decay < 0:
            raise SurgeryError(f"weight_decay must be at least 0, not {self.weight_decay!r}")
        if self.spike is not None and self.spike <= 1:
            raise SurgeryError(f"spike must be above 1, how many times the median loss may be, not {self.spike!r}")

    def _check_together(self) -> None:
        if self.max_tokens is self.max_seconds is self.max_steps is None:
            raise SurgeryError("nothing ends the run: give max_tokens, max_seconds or max_steps")
        if not self.data:
            raise SurgeryError("no data: give builtin, a file or a dataset")
        if self.teacher_logits is not None and self.max_tokens is self.max_steps is None:
            raise SurgeryError("teacher_logits are of a number of sequences: give max_tokens or max_steps")
        if self.train == "new" and self.teacher is None:
            raise SurgeryError('train "new" is what the teacher does not have: give the teacher, or use attention')
        if self.patience is not None and (not self.held_out or self.eval_every is None):
            raise SurgeryError("patience counts held-out measurements: give held_out and eval_every too")
        if self.evaluate_every is not None and not (self.evaluate_tasks and self.evaluate_data):
            raise SurgeryError(
                "evaluate_every is given, but nothing to evaluate: name evaluate_tasks and evaluate_data"
            )
        if self.lora_modules and self.train != "lora":
            raise SurgeryError('lora_modules are given, but train is not "lora"')

    def _check_nested(self) -> None:
        if not self.orthogonal:
            return
        if not self.nested_ranks:
            raise SurgeryError("orthogonal is for training at nested_ranks: give them, or set it to false")
        if self.train == "lora":
            raise SurgeryError("orthogonal moves the weights themselves, which lora holds still: set it to false")
        if self.entry_factors is not None:
            raise SurgeryError("orthogonal mixes latents, and entry_factors hold some of them: set it to false")

    def _check_objective(self) -> None:
        if not isinstance(self.objective, dict):
            raise SurgeryError(f"objective must name losses and their weights, not be {self.objective!r}")
        for name in self.objective:
            if name not in (*LOSSES, *SHAPES):
                raise SurgeryError(f"objective: unknown loss {name!r}{did_you_mean(str(name), [*LOSSES, *SHAPES])}")
        matched = [name for name in ("hidden", "attention", "layerwise") if self.objective.get(name)]
        distilled = matched + [name for name in ("kl", "reverse_kl", "jsd") if self.objective.get(name)]
        if distilled and not self.has_teacher:
            raise SurgeryError(f"objective {distilled[0]} compares with a teacher: give one, or use cross_entropy")
        if matched and (self.teacher is None or self.teacher_logits is not None):
            raise SurgeryError(f"objective {matched[0]} needs the teacher itself: its cached logits have no layers")
        if self.objective.get("layerwise") and (self.train == "all" or self.gradient_checkpointing):
            raise SurgeryError(
                "objective layerwise trains attentions alone and keeps all layers: set train to attention, "
                "gradient_checkpointing to false"
            )
        if matched and self.compile:
            raise SurgeryError(f"objective {matched[0]} looks into the layers, which compile hides: use one of them")

    def check_complete(self) -> None:
        """Raises SurgeryError where a healing could not start: no student, no place for the result, no objective."""
        for name in ("student", "out"):
            if not getattr(self, name):
                raise SurgeryError(f"{name} is not given: name it in the settings file")
        self.weights()

    def most_steps(self, processes: int) -> int | None:
        """Steps that the budget allows, as far as it does not depend on time."""
        tokens = self.global_batch(processes) * self.length
        by_tokens = None if self.max_tokens is None else -(-self.max_tokens // tokens)
        return min((limit for limit in (self.max_steps, by_tokens) if limit is not None), default=None)

    def global_batch(self, processes: int) -> int:
        """Sequences of one step over all processes."""
        return self.batch_size * self.gradient_accumulation * processes


def named(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern with * and ?; a pattern also fits the names that end in `.pattern`."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def _choose(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        hint = did_you_mean(str(value), list(allowed))
        raise SurgeryError(f"{name} {value!r} is unknown: choose {', '.join(allowed)}{hint}")


def _as_float(name: str, value: Any) -> float | None:
    """YAML reads 1e-4 as a string, since it has no point."""
    if value is None and name in ("clip", "max_seconds", "spike"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise SurgeryError(f"{name} must be a number, not {value!r}") from None
