"""Training loop: batches, losses, gradients, updates, measurements, checkpoints and stops.

Step s of a global batch of b sequences takes sequences s·b to (s + 1)·b - 1, dealt to the processes. The loss of a step
is the mean over all predicting positions of the global batch, so neither the number of processes nor gradient
accumulation changes the gradient. Decisions (to stop, to save) depend only on values that all processes share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from surgery.common.errors import SurgeryError
from surgery.common.human import count, decimal, duration, size, with_perplexity
from surgery.common.progress import Progress
from surgery.common.removed import removal
from surgery.training.checkpoints import BEST, Checkpoints
from surgery.training.data import Sequences, TrainingRow, collate, dealt
from surgery.training.guards import Interrupted, StopRequest, check_finite, memory_errors
from surgery.training.lr_multipliers import LRMultipliers
from surgery.training.measure import held_out_losses, peak_memory, summed
from surgery.training.nested import NestedRanks
from surgery.training.run_log import RunLog
from surgery.training.schedule import Budget, Position, learning_rate
from surgery.training.settings import HealSettings
from surgery.training.top_k import TopK

LINE_EVERY = 10
"""Steps between lines on the screen."""


@dataclass
class Training:
    """Inputs of the training loop, prepared by the accelerator and on its device.

    Attributes:
        module: a `distillation.Distillation`, possibly wrapped; `names` are the losses that it measures.
        identity: values that must not change when a run resumes, as plain JSON values.
        cached: returns the teacher's logits for sequence numbers; None without cached logits.
        keeps_best: whether to write the state with the lowest held-out KL divergence, the initial state included. Set
            for models with quantized caches, where too large a step undoes the conversion's calibration.
    """

    accelerator: Accelerator
    settings: HealSettings
    module: nn.Module
    names: list[str]
    optimizer: torch.optim.Optimizer
    factors: LRMultipliers
    sequences: Sequences
    held_out: list[TrainingRow]
    checkpoints: Checkpoints
    log: RunLog
    progress: Progress
    identity: dict[str, Any] = field(default_factory=dict)
    cached: Callable[[list[int]], TopK] | None = None
    keeps_best: bool = False


class Loop:
    """Training loop of one run.

    Attributes:
        ended: reason for the end of the run, empty before.
        takes_best: whether the best state is written instead of the last.
    """

    def __init__(self, training: Training) -> None:
        self._t = training
        settings, accelerator = training.settings, training.accelerator
        self.at = Position()
        self.ended, self.takes_best = "", training.keeps_best
        self._budget = Budget(settings.max_steps, settings.max_tokens, settings.max_seconds)
        self._processes, self._rank = accelerator.num_processes, accelerator.process_index
        self._batch = settings.global_batch(self._processes)
        # DDP and FSDP average over processes, accelerate over accumulated batches.
        self._averaged = self._processes * settings.gradient_accumulation
        self._parameters = [each for each in training.module.parameters() if each.requires_grad]
        self._began = self._saved = 0.0
        self._saved_step = -1
        self._doing = "the start"
        self._nested: NestedRanks | None = None
        if settings.nested_ranks:
            student = accelerator.unwrap_model(training.module).student
            self._nested = NestedRanks(student, settings.nested_ranks, settings.seed)
            training.identity |= {"nested_ranks": list(settings.nested_ranks)}

    @property
    def judge(self) -> str:
        """Name of the held-out loss by which the best state is chosen."""
        return "kl" if self._t.keeps_best and "kl" in self._t.names else "cross_entropy"

    def resume(self) -> bool:
        """Resume from the newest complete checkpoint; return False if there is none.

        Raises SurgeryError: the checkpoint was made with other data, models or settings.
        """
        path = self._t.checkpoints.latest(self._t.progress.note)
        if path is None:
            return False
        state = self._t.checkpoints.load(path)
        # Settings that were removed since then are ignored.
        saved_names = {name for name in state["identity"] if removal(name) is None}
        for name in sorted(self._t.identity.keys() | saved_names):
            value, saved_value = self._t.identity.get(name), _without_removed(name, state["identity"].get(name))
            if saved_value != value:
                raise SurgeryError.at(
                    path,
                    f"was made with {name} {saved_value!r}, not {value!r}; set it back, remove the checkpoints"
                    " (surgery heal --restart), or choose another out",
                )
        # Earlier versions stored more.
        self.at = Position(**{name: value for name, value in state["position"].items() if name in vars(self.at)})
        self._saved_step = self.at.step
        self._t.accelerator.step = 0  # accelerate's count of accumulated batches; checkpoints lie between steps
        self._t.progress.note(f"resuming after step {self.at.step} from {path}")
        before = Budget(**state.get("budget", asdict(self._budget)))  # earlier versions did not save it
        if before != self._budget:
            self._t.progress.note(f"the budget is {self._budget}, not {before}: the learning rate follows the new one")
        self._t.log.write("resume", step=self.at.step, checkpoint=str(path.name))
        return True

    def run(self) -> None:
        """Train until the budget is used up.

        Raises:
            Interrupted: SIGTERM or SIGINT arrived; a checkpoint was saved.
            SurgeryError: the loss is not finite, memory ran out, or a checkpoint cannot be written.
        """
        settings = self._t.settings
        self._began = time.monotonic() - self.at.seconds
        self._saved = self.at.seconds
        self._t.module.train()
        with StopRequest() as stop, memory_errors(lambda: self._doing):
            if self.at.step == 0:
                self._measure()
            while True:
                batches, numbers = self._next_batches()
                predicted, seconds, signal = self._synchronized(batches, stop)
                if signal:
                    self._interrupt(signal, stop)
                self.at.seconds = seconds
                self.ended = self._budget.reached(self.at.step, self.at.tokens, self.at.seconds)
                if self.ended:
                    break
                self._step(batches, numbers, predicted)
                if settings.eval_every is not None and self.at.step % settings.eval_every == 0:
                    self._measure()
                self._save_if_due()
            self._finish()

    def _next_batches(self) -> tuple[list, list[list[int]]]:
        settings = self._t.settings
        own = dealt(self.at.step, self._batch, self._rank, self._processes)
        numbers = [own[first : first + settings.batch_size] for first in range(0, len(own), settings.batch_size)]
        return [collate([self._t.sequences.sequence(number) for number in batch]) for batch in numbers], numbers

    def _synchronized(self, batches: list, stop: StopRequest) -> tuple[int, float, int]:
        """Return values that all processes share: predicting positions, rank 0's clock, and a received signal or 0."""
        values = [float(sum(batch.predicted for batch in batches)), 0.0, float(stop.signal)]
        if self._t.accelerator.is_main_process:
            values[1] = time.monotonic() - self._began
        predicted, seconds, signals = summed(self._t.accelerator, values)
        # Several processes may have received a signal: the sum only says whether there was one.
        return round(predicted), seconds, (stop.signal or 15) if signals else 0

    def _step(self, batches: list, numbers: list[list[int]], predicted: int) -> None:
        t, at = self._t, self.at
        began = time.monotonic()
        self._doing = f"step {at.step + 1}"
        rate = self._set_learning_rate()
        with nullcontext() if self._nested is None else self._nested.drawn(at.step):
            sums = self._backward(batches, numbers, max(1, predicted) / self._averaged)
            drawn = {"latents": self._nested.kept()} if self._nested is not None else {}
        t.factors.before_step()
        norm = t.accelerator.clip_grad_norm_(self._parameters, t.settings.clip or math.inf)
        *values, norm = _to_floats([*sums.values(), 0.0 if norm is None else norm])
        losses = dict(zip(sums, (value / self._averaged for value in summed(t.accelerator, values)), strict=True))
        # The fp16 loss scaler finds its scale by overflowing gradients, and skips these steps itself.
        checked = 0.0 if t.accelerator.scaler is not None else norm
        check_finite(losses["loss"], checked, at.step + 1, t.checkpoints.last_good)
        t.optimizer.step()
        t.factors.after_step()
        t.optimizer.zero_grad()
        at.step += 1
        at.tokens += self._batch * t.settings.length
        at.last_loss = losses["loss"]
        at.first_loss = losses["loss"] if at.first_loss is None else at.first_loss
        self._report({**losses, **drawn}, rate, norm, time.monotonic() - began)

    def _backward(self, batches: list, numbers: list[list[int]], positions: float) -> dict[str, Tensor]:
        """Accumulate the gradients of the batches; return the sums of the loss and its parts, on their device."""
        accelerator, module, cached = self._t.accelerator, self._t.module, self._t.cached
        sums: dict[str, Tensor] = {}
        for batch, rows in zip(batches, numbers, strict=True):
            with accelerator.accumulate(module):
                logits = None if cached is None else cached(rows).to(accelerator.device)
                loss, parts = module(batch.to(accelerator.device), positions, logits)
                accelerator.backward(loss)
            for name, part in {"loss": loss.detach(), **parts}.items():
                sums[name] = sums[name] + part if name in sums else part
        return sums

    def _set_learning_rate(self) -> float:
        """Set and return the learning rate at the middle of the coming step."""
        at, settings = self.at, self._t.settings
        tokens = at.tokens + self._batch * settings.length / 2
        used = self._budget.used(at.step + 0.5, tokens, at.seconds)
        factor = learning_rate(settings.schedule, used, warmup=settings.warmup)
        rate = settings.learning_rate * factor
        for group in self._t.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _report(self, losses: dict[str, float], rate: float, norm: float, seconds: float) -> None:
        at, tokens = self.at, self._batch * self._t.settings.length
        at.step_seconds += seconds
        line = {
            "step": at.step,
            "tokens": at.tokens,
            "seconds": round(at.seconds + seconds, 3),
            **losses,
            "learning_rate": rate,
            "gradient_norm": norm,
            "tokens_per_second": tokens / seconds,
            "memory_bytes": peak_memory(self._t.accelerator.device),
        }
        self._t.log.write("step", **line)
        self._t.log.track(at.step, {name: value for name, value in line.items() if name != "step"})
        if at.step % LINE_EVERY == 0 or at.step == 1:
            spent = at.seconds + seconds
            used = self._budget.used(at.step, at.tokens, spent)
            remaining = f", about {duration(spent * (1 - used) / used)} left" if 0 < used < 1 else ""
            speed = f"{count(tokens / seconds)} tokens/s, {size(line['memory_bytes'])}"
            parts = ", ".join(f"{name} {value:.4g}" for name, value in losses.items() if name != "loss")
            self._t.progress.note(
                f"step {at.step} ({used:.0%}{remaining}): loss {losses['loss']:.4g} ({parts}), {speed}"
            )

    def _measure(self) -> None:
        """Measure the held-out loss; save the best state if it is to be written."""
        t, at = self._t, self.at
        if not t.held_out:
            return
        with self._untimed(f"the held-out loss after step {at.step}"):
            values, judged = self._held_out_losses()
        at.measured_step = at.step
        at.last_held_out, at.first_held_out = values, at.first_held_out or values
        if self.judge == "kl":
            judged = values["kl"]
        better = at.best_held_out is None or judged < at.best_held_out
        if better:
            at.best_held_out, at.best_step = judged, at.step
        t.log.write("held_out", step=at.step, tokens=at.tokens, **values)
        t.log.track(at.step, {f"held_out/{name}": value for name, value in values.items()})
        parts = ", ".join(
            f"{name} {with_perplexity(value) if 'cross_entropy' in name else decimal(value, 4)}"
            for name, value in values.items()
        )
        t.progress.note(f"held-out losses after step {at.step}: {parts}")
        if better and self.takes_best:
            self._save(BEST)

    def _held_out_losses(self) -> tuple[dict[str, float], float]:
        """Return held-out losses by name ("cross_entropy_at_0.5" for a share), and the mean cross-entropy of shares."""
        t, losses = self._t, {}
        for share in self._nested.shares if self._nested is not None else (1.0,):
            with self._nested.cut(share) if self._nested is not None else nullcontext():
                values = held_out_losses(t.accelerator, t.module, t.held_out, t.settings.batch_size, t.names)
            if share != 1:  # the teacher's own loss does not depend on the share
                values = {
                    f"{name}_at_{share:g}": value for name, value in values.items() if not name.startswith("teacher")
                }
            losses |= values
        entropies = [value for name, value in losses.items() if name.split("_at_")[0] == "cross_entropy"]
        return losses, sum(entropies) / len(entropies)

    @contextmanager
    def _untimed(self, doing: str) -> Iterator[None]:
        """Exclude the time of a ``with`` block from the budget's seconds; for measurements."""
        self._doing, began = doing, time.monotonic()
        yield
        spent = time.monotonic() - began
        self._began += spent
        self.at.measuring_seconds += spent

    def _save_if_due(self) -> None:
        settings, at = self._t.settings, self.at
        by_steps = settings.save_every is not None and at.step % settings.save_every == 0
        by_time = settings.save_seconds is not None and at.seconds - self._saved >= settings.save_seconds
        if by_steps or by_time:
            self._save()

    def _save(self, name: str | None = None) -> None:
        at = self.at
        state = {"step": at.step, "position": asdict(at), "identity": self._t.identity, "budget": asdict(self._budget)}
        path = self._t.checkpoints.save(state, name)
        self._t.log.write("checkpoint", step=at.step, name=path.name)
        if name is None:
            self._saved, self._saved_step = at.seconds, at.step

    def _interrupt(self, number: int, stop: StopRequest) -> None:
        self._save()
        self._t.log.write("stop", step=self.at.step, signal=number)
        raise Interrupted(
            f"stopped by signal {number} after step {self.at.step}; saved in {self._t.checkpoints.last_good}:"
            " run the same command to resume",
            128 + number,
        )

    def _finish(self) -> None:
        """Measure and save at the end, and load the best state if it is to be written."""
        t, at = self._t, self.at
        if at.measured_step != at.step:
            self._measure()
        if at.step != self._saved_step:
            self._save()
        if self.takes_best and at.best_step not in (None, at.step):
            t.checkpoints.load(t.checkpoints.folder / BEST)
            t.progress.note(f"writing the state after step {at.best_step}, which has the lowest held-out {self.judge}")
        t.log.write("end", step=at.step, why=self.ended, seconds=at.seconds)
        t.progress.note(f"{self.ended}: {at.step} steps, {count(at.tokens)} tokens in {duration(at.seconds)}")


def _without_removed(name: str, value: Any) -> Any:
    """Return the value of a setting without entries that were removed since it was saved."""
    if not isinstance(value, dict):
        return value
    return {key: entry for key, entry in value.items() if removal(f"{name} {key}") is None}


def _to_floats(values: Sequence[Tensor | float]) -> list[float]:
    """Return scalars as floats, with one transfer (a synchronization) for those on a device."""
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]
    tensors = [value.double() for value in whole if isinstance(value, Tensor)]
    numbers = iter(torch.stack([each.to(tensors[0].device) for each in tensors]).tolist())
    return [next(numbers) if isinstance(value, Tensor) else float(value) for value in whole]
