"""Replies of a model to prompts, sampled for calibration."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.logits import evaluation_mode
from surgery.model.cache_argument import cache_for, returned_cache

FREE = -1
"""Placeholder of a token that is to be drawn."""


@torch.no_grad()
def sample_replies(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    ends: Collection[int],
    seed: int = 0,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[list[int]]:
    """Continues prompts at temperature 1, all of them at once, each up to the first token that ends it.

    Args:
        prompts: token ids of each, at least one.
        new_tokens: tokens after the longest prompt at most; those after a shorter one can be a few more.
        ends: tokens that end a reply, which keeps the one that does.
        advance: takes the number of tokens that each step adds to replies.

    Returns:
        Prompts with their replies.

    Raises:
        SurgeryError: the model's logits are not finite.
    """
    starts = [len(prompt) for prompt in prompts]
    length = max(starts) + new_tokens
    ids = torch.full((len(prompts), length), FREE)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    with evaluation_mode(model):
        drawn = _sample(model, ids, length, torch.Generator().manual_seed(seed), frozenset(ends), advance)
    replies = []
    for row, start in zip(drawn.tolist(), starts, strict=True):
        stop = next((place for place in range(start, len(row)) if row[place] in ends), len(row))
        replies.append(row[: stop + 1])
    return replies


def _sample(
    model: PreTrainedModel,
    ids: LongTensor,
    length: int,
    generator: torch.Generator,
    ends: frozenset[int],
    advance: Callable[[int], None],
) -> LongTensor:
    """Continues `given` [B, T], in which FREE stands for what is to be drawn, to [B, length] or until every row has
    drawn one of `ends`. No row needs padding: the longer ones are fed while the shorter ones draw already."""
    device = next(model.parameters()).device
    ids = torch.cat([ids, ids.new_full((len(ids), length - ids.shape[1]), FREE)], dim=1)
    drawn, cache, past_length = ids[:, : int((ids != FREE).sum(1).min())], None, 0
    ended = torch.zeros(len(ids), dtype=torch.bool)
    stops = torch.tensor(sorted(ends), dtype=torch.long)
    while drawn.shape[1] < length and not ended.all():
        output = model(input_ids=drawn[:, past_length:].to(device), use_cache=True, **cache_for(model, cache))
        cache, past_length = returned_cache(output), drawn.shape[1]
        prompt_token = ids[:, past_length : past_length + 1]
        token = torch.where(prompt_token == FREE, _draw(output.logits[:, -1], generator), prompt_token)
        advance(int(((prompt_token == FREE)[:, 0] & ~ended).sum()))
        ended |= (prompt_token == FREE)[:, 0] & torch.isin(token[:, 0], stops)
        drawn = torch.cat([drawn, token], dim=1)
    return drawn


def _draw(logits: Tensor, generator: torch.Generator) -> LongTensor:
    """One token [B, 1] from each row of logits [B, vocabulary]."""
    probabilities = torch.softmax(logits.float().cpu(), dim=-1)
    if not probabilities.isfinite().all():
        raise SurgeryError("the model's logits are not finite: nothing can be sampled from it")
    return torch.multinomial(probabilities, 1, generator=generator)
