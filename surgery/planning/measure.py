"""Carries candidates through the model side by side on held-out text, each without a fit, and scores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from surgery.calibration.held_out import HeldOut
from surgery.eval.bootstrap import Difference, paired_difference
from surgery.planning.candidates import Sized
from surgery.structures.base import Work
from surgery.structures.ladder import Ladder

SOURCE = "source"


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

    def beyond(self, source: Scored) -> Difference:
        """The loss increase, with an interval by text."""
        return paired_difference(self.losses, source.losses)


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
