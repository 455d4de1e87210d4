"""Interface of the methods that score heads: a session in, scores out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import LongTensor, Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.eval.session import ProgressLike
from surgery.heads.journal import Journal
from surgery.heads.needles import NeedleSet
from surgery.heads.settings import HeadSettings
from surgery.running.processes import Processes


@dataclass(frozen=True)
class ScoringSession:
    """One scoring, with one seed.

    Attributes:
        model: in evaluation mode, without gradients of its own, on its device.
        settings: what was asked for; ``length`` is filled in.
        text: natural text, windows of [N, T] for any n up to as many as there are: ``text(n)``.
        needles: sequences with planted facts: ``needles(n)``. Equal n give equal sequences.
        seed: of every random choice.
        processes: that share the work; all of them end with the same scores.
        journal: what an interrupted scoring resumes from.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    settings: HeadSettings
    text: Callable[[int], LongTensor]
    needles: Callable[[int], NeedleSet]
    seed: int
    processes: Processes
    progress: ProgressLike
    journal: Journal

    @property
    def layers(self) -> int:
        """L."""
        return self.model.config.num_hidden_layers

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.model.config.num_key_value_heads

    def samples(self, default: int) -> int:
        """Sequences to score on, of a method whose own default this is."""
        return self.settings.samples or default


@dataclass(frozen=True)
class HeadScores:
    """Scores of a method.

    Attributes:
        scores: [L, G] float32; the higher, the more a KV head needs its whole context. Their scale is the method's.
        parts: what they were made of, by name: tensors of any shape.
        facts: plain values for the pattern file's header: steps done, losses, counts.
    """

    scores: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Scorer(Protocol):
    """A way to score heads: a function in a file of its own, and a line in `surgery.heads.methods`."""

    def __call__(self, session: ScoringSession) -> HeadScores:
        """Scores every KV head of the session's model.

        Raises:
            SurgeryError: the model or its text cannot be scored so.
        """
