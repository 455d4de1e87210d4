"""Sampling of a model's replies to prompts, for calibration."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.logits import evaluation_mode
from surgery.model.cache_argument import cache_for, returned_cache

FREE = -1
"""Placeholder for a token to sample."""


@torch.no_grad()
def sample_replies(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    ends: Collection[int],
    seed: int = 0,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[list[int]]:
    """Return the token ids of prompts with replies, sampled at temperature 1, each up to its first end token.

    At most ``new_tokens`` follow the longest prompt; end tokens stay. ``advance`` is called at each step with the
    number of tokens added. Raises SurgeryError: the model's logits are not finite.
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
        stop = next((index for index in range(start, len(row)) if row[index] in ends), len(row))
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
    """Sample the FREE tokens of ``ids`` [B, T], up to [B, length] or until each row has one of ``ends``.

    Rows need no padding: prompt tokens of longer rows are fed while shorter rows already sample.
    """
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
    """Sample a token [B, 1] from each row of logits [B, vocabulary]."""
    probabilities = torch.softmax(logits.float().cpu(), dim=-1)
    if not probabilities.isfinite().all():
        raise SurgeryError(
            "the logits of the model contain NaN or infinity, so no replies can be sampled; try --dtype float32"
        )
    return torch.multinomial(probabilities, 1, generator=generator)
