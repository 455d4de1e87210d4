"""Planted recall: retrieval of random facts from far back in the context.

Facts are planted at random depths of ordinary text, and a question at the end asks for one of them:

    # The secret key of queue is 48213.
    ...
    # Recall: the secret key of queue is 48213.

The digits are random, so they can be predicted neither from the weights nor from nearby text, only by attention. If a
conversion breaks the few retrieval heads, recall drops while the loss barely changes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import BoolTensor, LongTensor

from surgery.common.errors import SurgeryError
from surgery.eval.logits import LogitReader
from surgery.eval.sequences import check_longer_than, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# fmt: off
NAMES = (
    "alpha", "buffer", "cache", "delta", "engine", "filter", "gamma", "handle", "index", "job", "kernel", "lock",
    "module", "node", "option", "packet", "queue", "record", "socket", "table", "user", "value", "worker", "zone",
)
# fmt: on
"""Names of facts. The order is part of the task: a seed picks names by index."""

# Facts start and end with a newline, so that they are tokenized the same at every position.
FACT = "\n# The secret key of {name} is {value}.\n"
QUESTION = "\n# Recall: the secret key of {name} is"
ANSWER = " {value}"
ENDING = ".\n"


@dataclass(frozen=True)
class RecallSet:
    """Recall prompts [N, T] int64: text with planted facts, followed by a question and its answer.

    `answer_mask` [N, T] is true at the digit tokens of the answer (not at the positions that predict them).
    """

    tokens: LongTensor
    answer_mask: BoolTensor


def fact_line(name: str, value: str) -> str:
    """Return the line that states a fact."""
    return FACT.format(name=name, value=value)


def recall_line(name: str, value: str) -> str:
    """Return the question for a fact, followed by its answer."""
    return (QUESTION + ANSWER + ENDING).format(name=name, value=value)


def draw_facts(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Draw `count` facts (name, five random digits) with distinct names.

    Raises SurgeryError: `count` is below 1 or above the number of names.
    """
    if not 1 <= count <= len(NAMES):
        raise SurgeryError(f"number of planted facts must be from 1 to {len(NAMES)}, not {count}")
    names = rng.sample(NAMES, count)
    return [(name, str(rng.randint(10_000, 99_999))) for name in names]


def recall_prompts(
    tokenizer: PreTrainedTokenizerBase,
    filler_ids: Sequence[int] | np.ndarray,
    count: int,
    length: int,
    seed: int,
    facts: int = 4,
) -> RecallSet:
    """Build prompts of ``length`` tokens: bos, text with facts at random depths, the question for one and its answer.

    Random windows are drawn from `filler_ids`; equal seeds give equal prompts. Raises SurgeryError: the text is too
    short, the facts do not fit in the length, or the tokenizer merges the end of the question with the answer.
    """
    check_longer_than(len(filler_ids), length)
    filler = np.asarray(filler_ids)
    rng = random.Random(seed)
    rows, masks = zip(*(_prompt(tokenizer, filler, length, rng, facts) for _ in range(count)), strict=True)
    return RecallSet(torch.tensor(rows, dtype=torch.long), torch.tensor(masks, dtype=torch.bool))


def recall_hits(reader: LogitReader, tokens: LongTensor, query_mask: BoolTensor) -> list[bool]:
    """Return for each prompt of a batch [B, T] whether greedy decoding gives all five digits.

    The right answer is fed to the model (teacher forcing), and the argmax is compared with it at every answer token.
    This is equivalent to greedy decoding after the question: up to the first wrong token, decoded and given tokens
    are equal. Only the number of right digits after the first error may differ, and it is not counted.

    Args:
        query_mask: [B, T], true at the answer tokens.
    """
    first = int(query_mask.any(0).nonzero()[0])
    guess = reader.logits(reader.states(tokens)[:, first - 1 : -1]).argmax(-1).to(tokens.device)
    hit = (guess == tokens[:, first:]) | ~query_mask[:, first:]
    return hit.all(1).tolist()


def _prompt(
    tokenizer: PreTrainedTokenizerBase, filler: np.ndarray, length: int, rng: random.Random, facts: int
) -> tuple[list[int], list[bool]]:
    """Build a prompt and its answer mask, both of `length`. The order of the random draws is part of the task."""
    start = rng.randint(0, len(filler) - length - 1)
    text = filler[start : start + length].tolist()
    pairs = draw_facts(rng, facts)
    planted = [tokenize(tokenizer, fact_line(*pair)) for pair in pairs]
    line, answer = answered_question(tokenizer, *pairs[rng.randrange(facts)])
    prefix = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    room = length - len(prefix) - sum(map(len, planted)) - len(line)
    if room < 0:
        raise SurgeryError(f"{facts} facts and a question take {length - room} tokens, more than the length {length}")
    cuts = sorted(rng.randint(0, room) for _ in planted)
    row, last = prefix, 0
    for cut, fact in zip(cuts, planted, strict=True):
        row = row + text[last:cut] + fact
        last = cut
    row = row + text[last:room]
    mask = [False] * len(row) + [index in answer for index in range(len(line))]
    return row + line, mask


def answered_question(tokenizer: PreTrainedTokenizerBase, name: str, value: str) -> tuple[list[int], range]:
    """Return the token ids of the recall line and the range of its digit tokens.

    Raises SurgeryError: the question is tokenized differently when the answer follows.
    """
    line = tokenize(tokenizer, recall_line(name, value))
    question = tokenize(tokenizer, QUESTION.format(name=name))
    answered = tokenize(tokenizer, (QUESTION + ANSWER).format(name=name, value=value))
    prompted = line[: len(question)] == question and line[: len(answered)] == answered
    if not prompted or len(question) == len(answered):
        raise SurgeryError(
            "planted recall does not work with this tokenizer: the tokens of "
            f"{QUESTION.format(name=name)!r} change when the answer and its full stop follow"
        )
    return line, range(len(question), len(answered))
