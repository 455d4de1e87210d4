"""Conversations to calibrate on: shipped prompts in a model's chat template, answered by the model."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.eval.logits import evaluation_mode
from surgery.eval.sequences import tokenize
from surgery.model.cache_argument import cache_for, returned_cache
from surgery.running.chat_templates import render_chat

REPLY = 160
"""Maximum tokens of a reply."""

PROMPTS = (
    "Explain to a ten-year-old why the sky is blue.",
    "Give me a simple recipe for lentil soup, with amounts for four people.",
    "Write a short letter to my landlord about a dripping tap.",
    "What are the main causes of the First World War?",
    "How does a bicycle stay upright while it is moving?",
    "Summarize the plot of Romeo and Juliet in five sentences.",
    "Write a Python function that returns the second largest number of a list.",
    "I have 3 boxes with 14 pencils each and give away 9 pencils. How many are left? Show your steps.",
    "Which is better for a small flat, a dog or a cat? Weigh both sides.",
    "Translate into French: The library closes at six, but you can return books at any time.",
    "Tell me a story about a lighthouse keeper who finds a letter in a bottle.",
    "What is the difference between weather and climate?",
    "My plants have yellow leaves. What could be wrong, and what should I try first?",
    "Write a product description for a waterproof backpack.",
    "How do vaccines work?",
    "List seven things to see in Rome, with a sentence on each.",
    "What does this SQL do: SELECT city, COUNT(*) FROM users GROUP BY city HAVING COUNT(*) > 10;",
    "Help me prepare for a job interview as a nurse. What will they ask?",
    "Write a poem of eight lines about the sea in winter.",
    "How can I sleep better? I wake up every night at three.",
    "Explain the rules of chess briefly, as if I had never seen a board.",
    "What happens to the water cycle when a forest is cut down?",
    "Correct the grammar: Me and him was going to the store when it begun raining.",
    "Plan a week of running for a beginner who wants to finish five kilometres.",
    "Why do prices rise when more money is printed?",
    "Describe how a car engine turns fuel into motion.",
    "Write an e-mail that politely declines an invitation to a wedding.",
    "Who was Marie Curie, and what is she known for?",
    "Compare solar and wind power in a table of advantages and drawbacks.",
    "What is recursion? Give a small example in JavaScript.",
    "Suggest names for a bakery near a railway station, and say why they fit.",
    "How do I change a flat tyre? Number the steps.",
    "Is it true that we use only ten percent of our brain?",
    "Draft a speech of one minute for my grandfather's eightieth birthday.",
    "A train leaves at 14:35 and arrives at 17:10. How long is the journey?",
    "What are the arguments for and against a four-day working week?",
    "Explain how photosynthesis works, from light to sugar.",
    "Give feedback on this sentence: The utilization of complex words impedes comprehension.",
    "What should I know before I visit Japan for the first time?",
    "Write a bash command that counts the lines of all .txt files in a folder, and explain it.",
)
HELD_OUT_PROMPTS = (
    "Why does bread rise, and what goes wrong when it does not?",
    "Write a dialogue between a taxi driver and a tourist who has lost her passport.",
    "What is inflation, and whom does it hurt most?",
    "How would you sort a million numbers that do not fit in memory?",
    "Describe the life of a medieval blacksmith in one day.",
    "My neighbor plays loud music at night. What can I do before I call the police?",
    "Explain the difference between a virus and a bacterium.",
    "Write a limerick about a cat who wanted to fly.",
    "What are black holes, and how do we know that they exist?",
    "Give me three ideas for a birthday party of six-year-olds in the rain.",
    "If a shirt costs 40 euros after a discount of 20 percent, what did it cost before?",
    "Summarize the advantages of learning a musical instrument as an adult.",
    "Write a class in Python for a bank account with deposit and withdrawal.",
    "How did the printing press change Europe?",
    "What is a healthy breakfast for someone who has no time to cook?",
    "Rewrite more politely: Send me the report now, you are late again.",
)


def sample_conversations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    prompts: Sequence[str] = PROMPTS,
    seed: int = 0,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[list[int]]:
    """Sample conversations of one question and the model's answer at temperature 1, at least ``tokens`` tokens in all.

    The seed shuffles the prompts, which are repeated with new answers if needed. ``advance`` is called with the number
    of new tokens. Returns the token ids of each, with the template's special tokens. Raises SurgeryError: the tokenizer
    has no chat template, or it does not accept a user's question.
    """
    ends = _eos_ids(model, tokenizer)
    encoded = [_prompt_ids(tokenizer, prompt) for prompt in prompts]
    rng = random.Random(seed)
    remaining = tokens

    def grow(more: int) -> None:
        nonlocal remaining
        more = min(more, remaining)  # the last answers may exceed `tokens`
        remaining -= more
        if more:
            advance(more)

    replies: list[list[int]] = []
    while (lacking := tokens - sum(map(len, replies))) > 0:
        # Enough prompts if replies are a third of their limit: another round would take far more decode steps.
        count = min(len(encoded), 1 + lacking // (REPLY // 3 + min(map(len, encoded))))
        questions = rng.sample(encoded, count)
        replies += sample_replies(model, questions, REPLY, ends, rng.getrandbits(32), grow)
        grow(sum(map(len, questions)))
    return replies


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    turns = [{"role": "user", "content": prompt}]
    return tokenize(tokenizer, render_chat(tokenizer, turns, add_generation_prompt=True))


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the eos tokens of the model's generation config and of the tokenizer."""
    token_ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    token_ids = token_ids if isinstance(token_ids, list) else [token_ids]
    return {int(token) for token in [*token_ids, tokenizer.eos_token_id] if token is not None}


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
    """Sample replies to a batch of prompts at temperature 1, each up to its first end token.

    Args:
        prompts: token ids of each prompt, at least one.
        new_tokens: maximum tokens after the longest prompt; replies to shorter prompts may be longer.
        ends: end tokens, which stay in the replies.
        advance: called at each step with the number of tokens added to replies.

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
