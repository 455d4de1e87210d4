"""Interface of methods that score heads: a function from a session to scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import LongTensor, Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.eval.session import ProgressLike
from surgery.heads.needles import NeedleSet
from surgery.heads.settings import HeadSettings


@dataclass(frozen=True)
class ScoringSession:
    """Inputs of a scoring with one seed.

    Attributes:
        model: model in evaluation mode, with frozen parameters, on its device.
        settings: settings of the scoring, with ``length`` filled in.
        text: ``text(n)`` returns up to n windows of natural text, [N, T].
        needles: ``needles(n)`` returns n sequences with planted facts; equal n give equal sequences.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    settings: HeadSettings
    text: Callable[[int], LongTensor]
    needles: Callable[[int], NeedleSet]
    seed: int
    progress: ProgressLike

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return self.model.config.num_hidden_layers

    @property
    def kv_heads(self) -> int:
        """Number of KV heads per layer, G."""
        return self.model.config.num_key_value_heads

    def samples(self, default: int) -> int:
        """Return the number of sequences to score on: the setting, or the method's default."""
        return self.settings.samples or default


@dataclass(frozen=True)
class HeadScores:
    """Scores of a method.

    Attributes:
        scores: [L, G] float32; the higher, the more a KV head needs its whole context. The scale depends on the method.
        parts: intermediate tensors of the scores, by name, of any shape.
        facts: plain values for the header of the pattern file: steps, losses, counts.
    """

    scores: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Scorer(Protocol):
    """Method that scores heads: a function in its own module, registered in `surgery.heads.methods`."""

    def __call__(self, session: ScoringSession) -> HeadScores:
        """Score every KV head of the session's model.

        Raises SurgeryError: the method does not support the model or its text.
        """
