"""Entropy of a model's next-token predictions, on the held-out text of the report."""

from dataclasses import dataclass

import torch
from torch import Tensor


def build(data):
    """Build the task from the texts of an evaluation."""
    return Entropy(data.text.tokens)


@dataclass(frozen=True)
class Entropy:
    """Mean entropy of the predicted distributions, in nats."""

    tokens: Tensor
    name: str = "entropy"
    native: bool = False

    def settings(self):
        # `surgery eval` adds the hash of the held-out text and the version of this package to what identifies a result.
        return {"tokens": self.tokens.numel()}

    @torch.no_grad()
    def run(self, model, session, entries=None):
        results = []
        for row in self.tokens[: session.limit]:
            log_probabilities = model(row[None].to(model.device)).logits.float().log_softmax(-1)
            results.append(float(-(log_probabilities.exp() * log_probabilities).sum(-1).mean()))
        mean = sum(results) / len(results)
        headline = {"value": mean, "title": "entropy", "about": "of the next token, in nats"}
        return {"headline": headline, "samples": results}
