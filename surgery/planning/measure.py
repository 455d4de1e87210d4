"""Carries candidates through the model side by side on held-out text, and scores them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import NormalDist, fmean, stdev

import torch
from torch import Tensor

from surgery.calibration.held_out import HeldOut
from surgery.checkpoint.tensors import as_bytes
from surgery.planning.weighed import Weighed
from surgery.structures.context import ConversionContext

LEVEL = 0.8
"""Share of other texts' losses that the interval of a prediction should hold."""
OTHER_TEXT = 0.25
"""Relative error of a loss on text of another kind, next to the spread by text: what it took on the demo
model for such intervals (docs/research/planning.md)."""


@dataclass(frozen=True)
class Increase:
    """Nats per token over the source's, and within what they should be on other text; None of a single text."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, differences: Sequence[float]) -> Increase:
        """Estimate the increase from the differences by text: Student's t (a bootstrap of so few is too narrow) and
        `OTHER_TEXT`."""
        mean, count = fmean(differences), len(differences)
        if count == 1:
            return cls(mean, None, None)
        half = math.hypot(student_t(count - 1) * stdev(differences) / math.sqrt(count), OTHER_TEXT * mean)
        return cls(mean, mean - half, mean + half)


def student_t(freedom: int, level: float = LEVEL) -> float:
    """Half the width of Student's interval, in standard errors, to 0.2% at 80% and three degrees of freedom.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


@dataclass(frozen=True)
class Scored:
    """Held-out measurement of a model.

    Attributes:
        losses: of each text, nats per token.
        answers: nats per token of the answers in recall prompts; None without prompts. A recall of so few prompts moves
            in leaps, this does not.
        recall: share of the prompts that are answered right; None without prompts.
        divergence: from the source, nats per token: half the mean square of what tokens' losses changed by, which is
            the Kullback-Leibler divergence to second order where the source's own probabilities are true. A hundred
            times less noise is in it than in the mean change, which has either sign.
    """

    losses: list[float]
    answers: float | None
    recall: float | None
    divergence: float = 0.0

    def with_more(self, other: Scored) -> Scored:
        """Return the measurement on these texts and on others with as many prompts a text."""
        texts, others = len(self.losses), len(other.losses)

        def mean(own: float | None, more: float | None) -> float | None:
            return None if own is None else (texts * own + others * more) / (texts + others)

        answers, recall = mean(self.answers, other.answers), mean(self.recall, other.recall)
        return Scored([*self.losses, *other.losses], answers, recall, mean(self.divergence, other.divergence))

    def beyond(self, source: Scored) -> Increase:
        """The loss increase."""
        return Increase.of([own - other for own, other in zip(self.losses, source.losses, strict=True)])


@dataclass(frozen=True)
class Carried:
    """Scores of the source and of candidates on the same text."""

    source: Scored
    scored: list[Scored]


@torch.no_grad()
def measure(candidates: Sequence[Weighed], work: ConversionContext, held_out: HeldOut) -> Carried:
    """Carry the source and candidates through the layers side by side; resumes what a killed plan had carried.

    Layers that stay unchanged run once for all whose hidden states are still the source's.
    """
    opened, stream, batch = work.opened, work.opened.stream, work.settings.batch_size
    rows = [None, *candidates]  # the source first
    loop = _loop(candidates, held_out)
    state = work.snapshots.last(loop, Scored) or {}
    scored = state.get("scored")
    if scored is None:
        # Of every row the place of its hidden states: one for all that are alike so far.
        places, states = state.get("places", [0] * len(rows)), state.get("states") or {0: stream.embed(held_out.tokens)}
        with work.progress.phase(f"try {len(candidates)} candidates", opened.layers) as advance:
            first = state.get("layer", 0)
            advance(first)
            for index in range(first, opened.layers):
                ways = [
                    (0 if number and rows[number].leaves(index) else number, place)
                    for number, place in enumerate(places)
                ]
                apart = list(dict.fromkeys(ways))
                remaining, following = Counter(place for _, place in apart), {}
                with stream.layer(index) as layer:
                    for number, place in sorted(apart):
                        remaining[place] -= 1
                        hidden = states[place].clone() if remaining[place] else states.pop(place)
                        attention, group = None, range(index, index + 1)
                        if number:
                            group = rows[number].group(index)
                            if len(group) == 1:
                                attention = rows[number].attention(work, index)
                        if len(group) == 1:
                            hidden = stream.run_layer(layer, hidden, batch, attention)
                        elif index == group.start:  # through all of it at once
                            hidden = rows[number].pass_group(work, group, hidden)
                        following[apart.index((number, place))] = hidden
                places, states = [apart.index(way) for way in ways], following
                now = {"places": places, "states": states, "layer": index + 1}
                work.snapshots.take(loop, lambda now=now: now)
                advance()
        losses = {place: _token_losses(work, held_out, hidden) for place, hidden in states.items()}
        source = losses[places[0]]
        by_place = {place: _score(work, held_out, hidden, losses[place], source) for place, hidden in states.items()}
        scored = [by_place[place] for place in places]
        work.snapshots.take(loop, lambda: {"scored": scored})
    return Carried(scored[0], scored[1:])


def _loop(candidates: Sequence[Weighed], held_out: HeldOut) -> str:
    """The name of this carrying among snapshots."""
    names = json.dumps([each.name for each in candidates]).encode()
    return f"carry-{sha256(names + as_bytes(held_out.tokens.contiguous()).numpy().tobytes()).hexdigest()[:16]}"


def _token_losses(work: ConversionContext, held_out: HeldOut, hidden: Tensor) -> Tensor:
    """Return the token losses of the texts [N, T - 1], from final hidden states [N, T, D]."""
    texts = held_out.texts
    return work.opened.stream.token_losses(hidden[:texts], held_out.tokens[:texts]).view(texts, -1)


def _score(work: ConversionContext, held_out: HeldOut, hidden: Tensor, losses: Tensor, source: Tensor) -> Scored:
    """Score final hidden states [N, T, D] and the token losses of the model and of the source."""
    recall, answers = held_out.answered(work.opened.stream, hidden)
    divergence = float((losses - source).square().mean()) / 2
    return Scored(losses.mean(1).tolist(), answers, recall, divergence)
