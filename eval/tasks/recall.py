"""Planted recall: the share of five-digit keys that the model retrieves from far back in its context."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel

from surgery.eval.logits import LogitReader, evaluation_mode
from surgery.eval.recall import RecallSet, recall_hits, recall_prompts
from surgery.eval.session import Session

if TYPE_CHECKING:
    from surgery.evaluation.task_data import TaskData

RECALL_SEED = 1
"""Offset of the seed for recall prompts, so that their filler text differs from the loss windows."""


@dataclass(frozen=True)
class RecallTask:
    """Accuracy of greedy answers to recall prompts; see `surgery.eval.recall`."""

    prompts: RecallSet
    name: ClassVar[str] = "recall"
    native: ClassVar[bool] = False

    def settings(self) -> dict[str, Any]:
        count, length = self.prompts.tokens.shape
        data = self.prompts.tokens.numpy().tobytes() + self.prompts.answer_mask.numpy().tobytes()
        return {"prompts": count, "length": length, "data_sha256": hashlib.sha256(data).hexdigest()}

    @torch.no_grad()
    def run(self, model: PreTrainedModel, session: Session, kept: None = None) -> dict[str, Any]:
        prompts = RecallSet(self.prompts.tokens[: session.limit], self.prompts.answer_mask[: session.limit])
        size = session.batch_size
        batches = list(zip(prompts.tokens.split(size), prompts.answer_mask.split(size), strict=True))
        with evaluation_mode(model), session.progress.phase("recall", len(batches), "batch") as advance:
            reader = LogitReader(model, prompts.tokens)
            results = session.processes.map(lambda batch: recall_hits(reader, *batch), batches, advance)
        hits = [int(hit) for batch in results for hit in batch]
        return {
            "accuracy": sum(hits) / len(hits),
            "prompts": len(hits),
            "length": prompts.tokens.shape[1],
            "hits": hits,
        }


def build(data: TaskData) -> RecallTask:
    """Build the task from the settings and texts of an evaluation."""
    settings = data.settings
    ids, seed = data.text.ids.numpy(), settings.seed + RECALL_SEED
    return RecallTask(recall_prompts(data.tokenizer, ids, settings.recall_prompts, settings.length, seed))
