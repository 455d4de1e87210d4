"""Simulation of candidates side by side on held-out text, and their scores."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import fmean, stdev

import torch
from torch import Tensor

from surgery.calibration.held_out import HeldOut
from surgery.checkpoint.tensors import as_bytes
from surgery.eval.intervals import student_t
from surgery.planning.engine_formats import Weighed
from surgery.structures.context import ConversionContext

LEVEL = 0.8
"""Confidence level of the interval of a predicted loss increase on other text."""
OTHER_TEXT = 0.25
"""Relative error of a loss increase on text of another kind, in addition to the spread over texts; calibrated on the
demo model."""


@dataclass(frozen=True)
class Increase:
    """Loss increase over the source in nats per token, with its interval on other text; low and high are None for a
    single text."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, differences: Sequence[float]) -> Increase:
        """Estimate the increase from differences by text, with Student's t and `OTHER_TEXT`."""
        mean, count = fmean(differences), len(differences)
        if count == 1:
            return cls(mean, None, None)
        half = math.hypot(student_t(count - 1, LEVEL) * stdev(differences) / math.sqrt(count), OTHER_TEXT * mean)
        return cls(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Scored:
    """Held-out measurement of a model, in nats per token.

    Attributes:
        losses: loss of each text.
        answers: loss on the answers of recall prompts, smoother than their recall; None without prompts.
        divergence: half the mean squared change of token losses from the source. This is the KL divergence to second
            order if the source's probabilities are the true ones, and has a hundred times less noise than the mean
            change.
    """

    losses: list[float]
    answers: float | None
    recall: float | None
    divergence: float = 0.0

    def merge_with(self, other: Scored) -> Scored:
        """Merge with the measurement on other texts, which have as many prompts per text."""
        texts, others = len(self.losses), len(other.losses)

        def mean(own: float | None, more: float | None) -> float | None:
            return None if own is None else (texts * own + others * more) / (texts + others)

        answers, recall = mean(self.answers, other.answers), mean(self.recall, other.recall)
        return Scored([*self.losses, *other.losses], answers, recall, mean(self.divergence, other.divergence))

    def beyond(self, source: Scored) -> Increase:
        """Return the loss increase over the source."""
        return Increase.of([own - other for own, other in zip(self.losses, source.losses, strict=True)])


@dataclass(frozen=True)
class Carried:
    """Scores of the source and of candidates on the same text."""

    source: Scored
    scored: list[Scored]


@torch.no_grad()
def measure(candidates: Sequence[Weighed], work: ConversionContext, held_out: HeldOut) -> Carried:
    """Run the source and candidates through the layers side by side, and score them; resumes after an interruption.

    Unchanged layers run once for all candidates with the same hidden states.
    """
    opened, stream, batch = work.opened, work.opened.stream, work.settings.batch_size
    rows = [None, *candidates]  # None is the source
    loop = _snapshot_name(candidates, held_out)
    state = work.snapshots.last(loop, Scored) or {}
    scored = state.get("scored")
    if scored is None:
        # `keys` maps rows to keys of `states`; rows with equal hidden states share one.
        keys, states = state.get("places", [0] * len(rows)), state.get("states") or {0: stream.embed(held_out.tokens)}
        with work.progress.phase(f"try {len(candidates)} candidates", opened.layers) as advance:
            first = state.get("layer", 0)
            advance(first)
            for index in range(first, opened.layers):
                runs = [
                    (0 if number and rows[number].leaves(index) else number, key) for number, key in enumerate(keys)
                ]
                distinct = list(dict.fromkeys(runs))
                remaining, outputs = Counter(key for _, key in distinct), {}
                with stream.layer(index) as layer:
                    for number, key in sorted(distinct):
                        remaining[key] -= 1
                        hidden = states[key].clone() if remaining[key] else states.pop(key)
                        attention, group = None, range(index, index + 1)
                        if number:
                            group = rows[number].group(index)
                            if len(group) == 1:
                                attention = rows[number].attention(work, index)
                        if len(group) == 1:
                            hidden = stream.run_layer(layer, hidden, batch, attention)
                        elif index == group.start:  # runs all layers of the group
                            hidden = rows[number].pass_group(work, group, hidden)
                        outputs[distinct.index((number, key))] = hidden
                keys, states = [distinct.index(run) for run in runs], outputs
                snapshot = {"places": keys, "states": states, "layer": index + 1}
                work.snapshots.take(loop, lambda snapshot=snapshot: snapshot)
                advance()
        losses = {key: _token_losses(work, held_out, hidden) for key, hidden in states.items()}
        source = losses[keys[0]]
        scored_by_key = {key: _score(work, held_out, hidden, losses[key], source) for key, hidden in states.items()}
        scored = [scored_by_key[key] for key in keys]
        work.snapshots.take(loop, lambda: {"scored": scored})
    return Carried(scored[0], scored[1:])


def _snapshot_name(candidates: Sequence[Weighed], held_out: HeldOut) -> str:
    """Return the snapshot name of a simulation, a hash of candidates and text."""
    names = json.dumps([each.name for each in candidates]).encode()
    return f"carry-{sha256(names + as_bytes(held_out.tokens.contiguous()).numpy().tobytes()).hexdigest()[:16]}"


def _token_losses(work: ConversionContext, held_out: HeldOut, hidden: Tensor) -> Tensor:
    """Compute the token losses [texts, T - 1] from final hidden states [N, T, D] of texts and prompts."""
    texts = held_out.texts
    return work.opened.stream.token_losses(hidden[:texts], held_out.tokens[:texts]).view(texts, -1)


def _score(work: ConversionContext, held_out: HeldOut, hidden: Tensor, losses: Tensor, source: Tensor) -> Scored:
    """Build the scores from final hidden states [N, T, D] and the token losses of model and source."""
    recall, answers = held_out.answered(work.opened.stream, hidden)
    divergence = float((losses - source).square().mean()) / 2
    return Scored(losses.mean(1).tolist(), answers, recall, divergence)
