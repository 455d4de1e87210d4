"""Task `match`: for how many tokens a model writes greedily what the baseline writes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import LongTensor
from transformers import PreTrainedModel

from surgery.eval.generation import complete
from surgery.eval.session import Session
from surgery.eval.work import Work, at_most, completing

if TYPE_CHECKING:
    from surgery.evaluation.task_data import TaskData


@dataclass(frozen=True)
class MatchTask:
    """Greedy continuations of held-out text beside the baseline's.

    Attributes:
        prompts: [N, T] int64.
        new_tokens: at most this many are written.
    """

    prompts: LongTensor
    new_tokens: int = 64
    name: ClassVar[str] = "match"
    native: ClassVar[bool] = False

    def settings(self) -> dict[str, Any]:
        count, length = self.prompts.shape
        data = hashlib.sha256(self.prompts.numpy().tobytes()).hexdigest()
        return {"prompts": count, "length": length, "new_tokens": self.new_tokens, "data_sha256": data}

    def work(self, session: Session) -> dict[str, Work]:
        count, length = self.prompts.shape
        return {self.name: completing(at_most(count, session.limit), length, session.batch_size, self.new_tokens)}

    @torch.no_grad()
    def keep(self, model: PreTrainedModel, session: Session) -> list[list[int]]:
        """The baseline's continuations."""
        prompts = self.prompts[: session.limit].tolist()
        return complete(model, session, prompts, self.new_tokens, "match: baseline's continuations")

    @torch.no_grad()
    def run(self, model: PreTrainedModel, session: Session, kept: list[list[int]] | None) -> dict[str, Any]:
        """Returns "tokens": mean number of first tokens that agree, of "of" tokens that the baseline writes; "same":
        share of continuations that agree throughout; "per_prompt". Without a baseline there is nothing to agree with,
        and all of them are None."""
        if kept is None:
            return {"tokens": None, "of": None, "same": None, "per_prompt": None}
        written = complete(model, session, self.prompts[: session.limit].tolist(), self.new_tokens, self.name)
        agreed = [agreement(own, other) for own, other in zip(written, kept, strict=True)]
        return {
            "tokens": sum(agreed) / len(agreed),
            "of": sum(map(len, kept)) / len(kept),
            "same": sum(own == other for own, other in zip(written, kept, strict=True)) / len(kept),
            "per_prompt": agreed,
        }


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """First tokens that two continuations have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def build(data: TaskData) -> MatchTask:
    """From the settings and texts of an evaluation."""
    asked = data.settings
    return MatchTask(data.text.tokens[: asked.match_prompts, : asked.length // 2], asked.match_tokens)
