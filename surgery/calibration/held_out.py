"""Held-out text and recall prompts, and scores of a streamed model on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.running.layer_stream import LayerStream

COMPARED = 16
"""Minimum number of positions at which logits are compared, if sequences are long enough."""


@dataclass(frozen=True)
class Score:
    """Mean loss in nats per predicted token and share of recall prompts answered correctly; None if not measured.

    For exact conversions ``logit_difference`` is the largest difference of logits from the source on a short text,
    relative to the largest logit. ``sequences`` is the number of texts in the loss, if not all.
    """

    loss: float | None
    recall: float | None
    logit_difference: float | None = None
    sequences: int | None = None


@dataclass(frozen=True)
class HeldOut:
    """Held-out sequences of equal length, which stream as one batch.

    The first ``texts`` rows are text for the loss, the remaining rows recall prompts with a mask over their answers.
    """

    tokens: Tensor  # [N, T]
    texts: int
    answers: Tensor  # bool [N - texts, T]

    @classmethod
    def of_text(cls, texts: Tensor) -> HeldOut:
        """Create from text [N, T], without recall prompts."""
        return cls(texts, len(texts), torch.zeros(0, texts.shape[1], dtype=torch.bool))

    @classmethod
    def random(cls, vocabulary: int, count: int, length: int, seed: int) -> HeldOut:
        """Create from random tokens, on which logits can be compared but nothing scored."""
        generator = torch.Generator().manual_seed(seed)
        return cls(torch.randint(vocabulary, (count, length), generator=generator), 0, torch.zeros(count, length) > 0)

    def split(self, texts: int) -> tuple[HeldOut, HeldOut]:
        """Split into the first ``texts`` texts and as many recall prompts, and the rest."""
        prompts = min(texts, len(self.answers))
        first, second = self.tokens[: self.texts].split([texts, self.texts - texts])
        prompt_tokens, others = self.tokens[self.texts :].split([prompts, len(self.answers) - prompts])
        return (
            HeldOut(torch.cat([first, prompt_tokens]), texts, self.answers[:prompts]),
            HeldOut(torch.cat([second, others]), self.texts - texts, self.answers[prompts:]),
        )

    def with_recall(self, tokens: Tensor, answers: Tensor) -> HeldOut:
        """Append recall prompts [n, T] with a mask of their answers, bool [n, T]."""
        return HeldOut(torch.cat([self.tokens, tokens]), self.texts, answers)

    def score(self, stream: LayerStream, hidden: Tensor) -> Score:
        """Score final hidden states [N, T, D], before the last norm."""
        loss = stream.loss(hidden[: self.texts], self.tokens[: self.texts]) if self.texts else None
        return Score(loss, self.answered(stream, hidden)[0])

    def answered(self, stream: LayerStream, hidden: Tensor) -> tuple[float | None, float | None]:
        """Return the share of recall prompts answered correctly and the answers' loss in nats per token, or None."""
        if not self.answers.any() or len(hidden) == self.texts:
            return None, None
        row, position = self.answers.nonzero().T
        logits = stream.logits(hidden[self.texts :][row, position - 1].to(stream.device, stream.dtype))
        targets = self.tokens[self.texts :][row, position].to(logits.device)
        wrong = (logits.argmax(-1) != targets).cpu()
        recall = 1 - len(row[wrong].unique()) / len(self.answers)
        return recall, float(torch.nn.functional.cross_entropy(logits.double(), targets))


def logit_difference(stream: LayerStream, hidden: Tensor, other_stream: LayerStream, other: Tensor) -> float:
    """Compute the largest difference of logits at the last positions of shared sequences, relative to the largest."""
    count = min(len(hidden), len(other))
    last = slice(-math.ceil(COMPARED / count), None)
    logits = stream.logits(hidden[:count, last].to(stream.device, stream.dtype))
    others = other_stream.logits(other[:count, last].to(other_stream.device, other_stream.dtype))
    return float((logits - others).abs().max() / logits.abs().max())
