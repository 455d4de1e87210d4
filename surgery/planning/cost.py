"""What a score costs: nats per token of text, and of the answers in recall prompts."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.planning.measure import Increase, Scored

ANSWER_WEIGHT = 0.05
"""What a nat on the answer of a recall prompt counts as, in nats on a token of text: the mean loss of text hides it."""


@dataclass(frozen=True)
class Cost:
    """Compares scores with the source's."""

    source: Scored

    def increase(self, scored: Scored) -> Increase:
        """Of the loss on text."""
        return scored.beyond(self.source)

    def answers(self, scored: Scored) -> float | None:
        """Nats per token more on answers; None without prompts."""
        return None if scored.answers is None else scored.answers - self.source.answers

    def parts(self, scored: Scored) -> tuple[float, float]:
        """What text and answers add to the cost."""
        return self.increase(scored).mean, ANSWER_WEIGHT * max(0.0, self.answers(scored) or 0.0)

    def __call__(self, scored: Scored) -> float:
        return sum(self.parts(scored))
