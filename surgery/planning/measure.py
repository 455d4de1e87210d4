"""Carries candidates through the model side by side on held-out text, each without a fit, and scores them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist, fmean, stdev

import torch
from torch import Tensor

from surgery.calibration.held_out import HeldOut
from surgery.planning.candidates import Sized
from surgery.structures.base import Work
from surgery.structures.ladder import Ladder

SOURCE = "source"
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
    """

    losses: list[float]
    answers: float | None
    recall: float | None

    def beyond(self, source: Scored) -> Increase:
        """The loss increase."""
        return Increase.of([own - other for own, other in zip(self.losses, source.losses, strict=True)])


def measure(candidates: Sequence[Sized], work: Work, held_out: HeldOut) -> tuple[Scored, list[Scored]]:
    """Scores of the source and of every candidate."""
    opened, progress = work.opened, work.progress
    stages = [str(number) for number in range(len(candidates))]
    ladder = Ladder(opened.stream, held_out, work.settings.batch_size, tuple(stages))
    caches = [candidate.caches() for candidate in candidates]
    with progress.phase(f"try {len(candidates)} candidates", opened.layers) as advance:
        for index in range(opened.layers):
            forms = {
                stage: partial(candidate.structure.closed_form, work, index, cache[index])
                for stage, candidate, cache in zip(stages, candidates, caches, strict=True)
            }
            with opened.stream.layer(index) as layer:
                if index in opened.stateful:
                    ladder.go_past(layer, None)
                else:
                    ladder.advance(layer, opened.anatomy(index).to(torch.float64), forms, lossy=())
            advance()
    scored = {stage: _score(work, held_out, hidden) for stage, hidden in ladder.hidden.items()}
    return scored[SOURCE], [scored[stage] for stage in stages]


def _score(work: Work, held_out: HeldOut, hidden: Tensor) -> Scored:
    """Of final hidden states [N, T, D]."""
    stream, texts = work.opened.stream, held_out.texts
    losses = stream.token_losses(hidden[:texts], held_out.tokens[:texts]).view(texts, -1)
    recall, answers = held_out.answered(stream, hidden)
    return Scored(losses.mean(1).tolist(), answers, recall)
