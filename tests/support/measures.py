"""Loss and recall of a loaded model, as the tasks of an evaluation take them, without an evaluation around."""

import torch
from torch import LongTensor, nn

from surgery.eval.logits import LogitReader, evaluation_mode
from surgery.eval.recall import RecallSet, recall_hits
from surgery.eval.tasks.loss import losses_of_states


@torch.no_grad()
def mean_loss(model: nn.Module, tokens: LongTensor, batch_size: int = 8) -> float:
    """Nats per predicted token of [N, T]."""
    with evaluation_mode(model):
        reader = LogitReader(model, tokens)
        batches = tokens.split(batch_size)
        losses = [losses_of_states(reader, reader.states(batch)[:, :-1], batch[:, 1:]) for batch in batches]
    return float(torch.cat(losses).double().mean())


@torch.no_grad()
def recall_accuracy(model: nn.Module, prompts: RecallSet, batch_size: int = 8) -> float:
    """Share of prompts that are answered right."""
    batches = zip(prompts.tokens.split(batch_size), prompts.answer_mask.split(batch_size), strict=True)
    with evaluation_mode(model):
        reader = LogitReader(model, prompts.tokens)
        hits = [hit for tokens, settings in batches for hit in recall_hits(reader, tokens, settings)]
    return sum(hits) / len(hits)


def refuse_above(model: nn.Module, tokens: int, error: Exception) -> None:
    """Let a model raise `error` for passes of more tokens than that."""
    forward = model.forward

    def limited(input_ids, **rest):
        if input_ids.numel() > tokens:
            raise error
        return forward(input_ids=input_ids, **rest)

    model.forward = limited
