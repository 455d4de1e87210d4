"""Carries candidates through the model side by side on held-out text, each without a fit, and scores them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from operator import itemgetter
from statistics import NormalDist, fmean, stdev

import torch
from torch import Tensor, nn

from surgery.calibration.held_out import HeldOut
from surgery.checkpoint.tensors import as_bytes
from surgery.families.attention import CapturedAttention
from surgery.planning.candidates import Sized
from surgery.running.layer_stream import StreamedLayer
from surgery.structures.work import Work

LEVEL = 0.8
"""Share of other texts' losses that the interval of a prediction should hold."""
OTHER_TEXT = 0.25
"""How far off, relatively, a loss is on text of another kind, beside the spread by text: what it took on the demo
model for such intervals (docs/planning.md)."""


@dataclass(frozen=True)
class Increase:
    """Nats per token over the source's, and within what they should be on other text; None of a single text."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, differences: Sequence[float]) -> Increase:
        """Of the differences by text: Student's t (of so few a bootstrap is too narrow) and `OTHER_TEXT`."""
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
    """What held-out text says of a model.

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
        """Of these texts and of others, with as many prompts a text."""
        texts, others = len(self.losses), len(other.losses)

        def mean(own: float | None, more: float | None) -> float | None:
            return None if own is None else (texts * own + others * more) / (texts + others)

        answers, recall = mean(self.answers, other.answers), mean(self.recall, other.recall)
        return Scored([*self.losses, *other.losses], answers, recall, mean(self.divergence, other.divergence))

    def beyond(self, source: Scored) -> Increase:
        """The loss increase."""
        return Increase.of([own - other for own, other in zip(self.losses, source.losses, strict=True)])


Line = Sequence["Sized | None"]
"""A model: for every layer the candidate that it is of, None where it stays as it is."""

LATER = "later candidates"
"""What progress is told of those that are still to be carried."""
WEIGHED_SEQUENCES = 2
"""Of texts, and of recall prompts, on which errors of a layer's output are weighed."""


@dataclass(frozen=True)
class Carried:
    """What became of models that were carried through the layers side by side.

    Attributes:
        scored: each of them.
        errors: of every layer by the candidate's ``id``: squared errors of its output in the metric of the loss, on
            texts and where recall prompts are answered; empty where they were not asked for.
    """

    source: Scored
    scored: list[Scored]
    errors: list[dict[int, tuple[float, float]]]

    def with_more(self, others: Carried) -> Carried:
        """These models and others behind them."""
        errors = [own | more for own, more in zip(self.errors, others.errors, strict=True)]
        return Carried(self.source, [*self.scored, *others.scored], errors)


def measure(
    candidates: Sequence[Sized], work: Work, held_out: HeldOut, *, weighs: bool = False, later: int = 0
) -> Carried:
    """Carries candidates alone through the layers, each in all of them; arguments are those of `carry`."""
    return carry([[each] * work.opened.layers for each in candidates], work, held_out, weighs=weighs, later=later)


@torch.no_grad()
def carry(lines: Sequence[Line], work: Work, held_out: HeldOut, *, weighs: bool = False, later: int = 0) -> Carried:
    """Carries the source and models through the layers side by side; what begins alike goes the first way together.

    Goes on with what a plan that was killed had carried.

    Args:
        weighs: whether to weigh the errors of every layer of candidates.
        later: tokens that may be carried after these, times models, for the time left.
    """
    opened, stream, batch = work.opened, work.opened.stream, work.settings.batch_size
    items = list({id(item): item for line in lines for item in line if item}.values())
    numbers = {id(item): number for number, item in enumerate(items, 1)}  # 0 is the layer as it is
    rows = [[0] * opened.layers, *([numbers[id(item)] if item else 0 for item in line] for line in lines)]
    caches, loop = [item.caches() for item in items], _loop(items, rows, held_out, weighs)
    state = work.snapshots.last(loop, Scored) or {}
    errors, scored = state.get("errors", []), state.get("scored")
    if scored is None:
        places, states = state.get("places", [0] * len(rows)), state.get("states") or {0: stream.embed(held_out.tokens)}
        phase = f"try {len(lines)} candidates"
        work.progress.expect({phase: len(rows) * held_out.tokens.numel(), LATER: later})
        with work.progress.phase(phase, opened.layers) as advance:
            advance(len(errors))
            for index in range(len(errors), opened.layers):
                # Of every model what its layer is, and the state before it.
                ways = [
                    (0 if index in opened.fixed else row[index], place) for row, place in zip(rows, places, strict=True)
                ]
                apart = list(dict.fromkeys(ways))
                left, following, errors_here = Counter(place for _, place in apart), {}, {}
                with stream.layer(index) as layer:
                    weigh = _Weighing(work, index, layer, held_out, states[places[0]]) if weighs else None
                    for number, here in groupby(sorted(apart), key=itemgetter(0)):
                        attention, group = None, range(index, index + 1)
                        if number:
                            structure, cache = items[number - 1].structure, caches[number - 1][index]
                            group = structure.group(index)
                            attention = structure.closed_form(work, index, cache) if len(group) == 1 else None
                        if weigh and attention:
                            errors_here[number] = weigh(attention)
                        for way in here:
                            left[way[1]] -= 1
                            hidden = states[way[1]].clone() if left[way[1]] else states.pop(way[1])
                            if len(group) == 1:
                                hidden = stream.run_layer(layer, hidden, batch, attention)
                            elif index == group.start:  # through all of it at once
                                hidden = structure.pass_group(work, group, hidden)
                            following[apart.index(way)] = hidden
                places, states = [apart.index(way) for way in ways], following
                errors.append(errors_here)
                now = {"places": places, "states": states, "errors": errors}
                work.snapshots.take(loop, lambda now=now: now)
                advance()
        losses = {place: _token_losses(work, held_out, hidden) for place, hidden in states.items()}
        source = losses[places[0]]
        by_place = {place: _score(work, held_out, hidden, losses[place], source) for place, hidden in states.items()}
        scored = [by_place[place] for place in places]
        work.snapshots.take(loop, lambda: {"scored": scored, "errors": errors})
    by_id = [{id(items[number - 1]): error for number, error in here.items()} for here in errors]
    return Carried(scored[0], scored[1:], by_id)


def _loop(items: Sequence[Sized], rows: Sequence[Sequence[int]], held_out: HeldOut, weighs: bool) -> str:
    """What snapshots know the carrying of these models by."""
    asked = json.dumps([[item.name for item in items], rows, weighs]).encode()
    return f"carry-{sha256(asked + as_bytes(held_out.tokens.contiguous()).numpy().tobytes()).hexdigest()[:16]}"


class _Weighing:
    """Errors of a layer's output on the source's inputs, in the metric of the loss."""

    def __init__(self, work: Work, index: int, layer: StreamedLayer, held_out: HeldOut, hidden: Tensor):
        stream, texts = work.opened.stream, held_out.texts
        rows = [*range(min(WEIGHED_SEQUENCES, texts)), *range(texts, len(hidden))[:WEIGHED_SEQUENCES]]
        anatomy = work.opened.anatomy(index).to(stream.device, stream.dtype)
        self._source = CapturedAttention(anatomy)
        layer(hidden[rows].to(stream.device, stream.dtype), self._source)
        self._metric = work.library.load(index)[0].output_metric.to(stream.device, stream.dtype)
        self._texts = sum(row < texts for row in rows)
        # An answer is read from the token before it.
        self._answers = held_out.answers[: len(rows) - self._texts].roll(-1, dims=1).to(stream.device)

    def __call__(self, attention: nn.Module) -> tuple[float, float]:
        error = attention(self._source.inputs)[0] - self._source.outputs
        cost = ((error @ self._metric) * error).sum(-1)
        answers = cost[self._texts :][self._answers] if self._answers.any() else cost
        return float(cost[: self._texts].mean()), float(answers.mean())


def _token_losses(work: Work, held_out: HeldOut, hidden: Tensor) -> Tensor:
    """Of the texts [N, T - 1], from final hidden states [N, T, D]."""
    texts = held_out.texts
    return work.opened.stream.token_losses(hidden[:texts], held_out.tokens[:texts]).view(texts, -1)


def _score(work: Work, held_out: HeldOut, hidden: Tensor, losses: Tensor, source: Tensor) -> Scored:
    """Of final hidden states [N, T, D] and token losses, the model's and the source's."""
    recall, answers = held_out.answered(work.opened.stream, hidden)
    divergence = float((losses - source).square().mean()) / 2
    return Scored(losses.mean(1).tolist(), answers, recall, divergence)
