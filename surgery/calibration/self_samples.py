"""The model's own samples as calibration text: no data needed, and just what the model expects to see."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.eval.logits import evaluation_mode
from surgery.model.cache_argument import cache_for, returned_cache

FREE = -1
"""In the place of a token that is to be drawn."""


@torch.no_grad()
def sample_from_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    length: int,
    batch_size: int = 8,
    temperature: float = 1.0,
    seed: int = 0,
) -> LongTensor:
    """Samples sequences from the model itself, from its bos on (its eos, where it has no bos).

    The full distribution is sampled, whatever the checkpoint's generation config says of top-k, top-p or stopping: the
    model goes on after an eos, as in the packed text it was trained on. Draws are made on the CPU from `seed`, so equal
    arguments give equal samples as far as the logits are equal.

    Args:
        tokens: tokens wanted; rounded up to whole sequences.
        length: tokens T of a sequence, the first included.
        batch_size: sequences sampled at once.
        temperature: above 1 flattens, below 1 sharpens the model's distribution.

    Returns:
        Token ids [N, T], int64, on the CPU.

    Raises:
        SurgeryError: an argument is out of its range, the tokenizer has neither bos nor eos, or the model's logits are
            not finite.
    """
    if tokens < 1 or length < 2 or batch_size < 1:
        raise SurgeryError(f"cannot sample {tokens} tokens in sequences of {length}, {batch_size} at once")
    if not temperature > 0:
        raise SurgeryError(f"temperature {temperature}: it must be above 0")
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise SurgeryError(f"samples of {length} tokens are longer than the model's {longest} positions")
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise SurgeryError("the tokenizer has neither a bos nor an eos token to start samples from")

    generator = torch.Generator().manual_seed(seed)
    starts = torch.full((-(-tokens // length), 1), first)
    with evaluation_mode(model):
        batches = [_sample(model, start, length, temperature, generator) for start in starts.split(batch_size)]
    return torch.cat(batches)


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
    """
    starts = [len(prompt) for prompt in prompts]
    length = max(starts) + new_tokens
    given = torch.full((len(prompts), length), FREE)
    for row, prompt in zip(given, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    with evaluation_mode(model):
        drawn = _sample(model, given, length, 1.0, torch.Generator().manual_seed(seed), frozenset(ends), advance)
    replies = []
    for row, start in zip(drawn.tolist(), starts, strict=True):
        stop = next((place for place in range(start, len(row)) if row[place] in ends), len(row))
        replies.append(row[: stop + 1])
    return replies


def _sample(
    model: PreTrainedModel,
    given: LongTensor,
    length: int,
    temperature: float,
    generator: torch.Generator,
    ends: frozenset[int] = frozenset(),
    advance: Callable[[int], None] = lambda tokens: None,
) -> LongTensor:
    """Continues `given` [B, T], in which FREE stands for what is to be drawn, to [B, length] or until every row has
    drawn one of `ends`. No row needs padding: the longer ones are fed while the shorter ones draw already."""
    device = next(model.parameters()).device
    given = torch.cat([given, given.new_full((len(given), length - given.shape[1]), FREE)], dim=1)
    drawn, cache, fed = given[:, : int((given != FREE).sum(1).min())], None, 0
    ended = torch.zeros(len(given), dtype=torch.bool)
    stops = torch.tensor(sorted(ends), dtype=torch.long)
    while drawn.shape[1] < length and not ended.all():
        output = model(input_ids=drawn[:, fed:].to(device), use_cache=True, **cache_for(model, cache))
        cache, fed = returned_cache(output), drawn.shape[1]
        known = given[:, fed : fed + 1]
        token = torch.where(known == FREE, _draw(output.logits[:, -1], temperature, generator), known)
        advance(int(((known == FREE)[:, 0] & ~ended).sum()))
        ended |= (known == FREE)[:, 0] & torch.isin(token[:, 0], stops)
        drawn = torch.cat([drawn, token], dim=1)
    return drawn


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> LongTensor:
    """One token [B, 1] from each row of logits [B, vocabulary]."""
    probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
    if not probabilities.isfinite().all():
        raise SurgeryError("the model's logits are not finite: nothing can be sampled from it")
    return torch.multinomial(probabilities, 1, generator=generator)
