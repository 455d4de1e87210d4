"""Planted recall: does a model still find, far back in its context, what only attention can bring?

Facts are planted at random depths of ordinary text, and one of them is asked for at the end:

    # The secret key of queue is 48213.
    ...
    # Recall: the secret key of queue is 48213.

The digits are random, so neither the weights nor the nearby text can know them. The loss hardly notices when a
conversion breaks the few heads that do this; recall does.
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
"""Subjects of facts. The order is part of the task: a seed picks names by their place in it."""

# Every line starts and ends with a newline, so that it is tokenized alike wherever it is put.
FACT = "\n# The secret key of {name} is {value}.\n"
QUESTION = "\n# Recall: the secret key of {name} is"
ANSWER = " {value}"
ENDING = ".\n"


@dataclass(frozen=True)
class RecallSet:
    """Recall prompts with their answers.

    Attributes:
        tokens: [N, T] int64, each row text with planted facts, then a question and its answer.
        answer_mask: [N, T] bool, true at the tokens of the answer's digits (tokens to be predicted, not positions that
            predict).
    """

    tokens: LongTensor
    answer_mask: BoolTensor


def fact_line(name: str, value: str) -> str:
    """The line that plants a fact."""
    return FACT.format(name=name, value=value)


def recall_line(name: str, value: str) -> str:
    """The line that asks for a fact and answers."""
    return (QUESTION + ANSWER + ENDING).format(name=name, value=value)


def draw_facts(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """`count` facts (name, five random digits) with different names.

    Raises:
        SurgeryError: `count` is below 1 or above the number of names.
    """
    if not 1 <= count <= len(NAMES):
        raise SurgeryError(f"{count} planted facts: from 1 to {len(NAMES)} are possible, one for each name")
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
    """Builds recall prompts: bos, text with facts at random depths, and at the end the question for one, answered.

    Args:
        tokenizer: of the model to measure. Prompts start with its bos token if it has one.
        filler_ids: token ids of the text between the facts; windows of it are drawn at random.
        count: number of prompts N.
        length: tokens T of every prompt, bos and answer included.
        seed: equal seeds give equal prompts.
        facts: facts in each prompt, one of which is asked for.

    Raises:
        SurgeryError: the text is too short, the facts do not fit in the length, or the tokenizer joins the end of the
            question to the answer so that the question alone is no prompt.
    """
    check_longer_than(len(filler_ids), length)
    filler = np.asarray(filler_ids)
    rng = random.Random(seed)
    rows, masks = zip(*(_prompt(tokenizer, filler, length, rng, facts) for _ in range(count)), strict=True)
    return RecallSet(torch.tensor(rows, dtype=torch.long), torch.tensor(masks, dtype=torch.bool))


def recall_hits(reader: LogitReader, tokens: LongTensor, query_mask: BoolTensor) -> list[bool]:
    """Return which prompts of one batch [B, T] are answered right, all five digits, greedily.

    The model sees the right answer while it is measured, and its most likely token is compared at every place of it.
    That decides the same as letting it decode greedily after the question: as long as it has been right, what it
    decoded is what it is shown, so all places are right in one case if and only if they are in the other. Only the
    number of digits right after a first mistake may differ, and that is not counted.

    Args:
        query_mask: [B, T], true at the tokens of the answers.
    """
    first = int(query_mask.any(0).nonzero()[0])
    guess = reader.logits(reader.states(tokens)[:, first - 1 : -1]).argmax(-1).to(tokens.device)
    hit = (guess == tokens[:, first:]) | ~query_mask[:, first:]
    return hit.all(1).tolist()


def _prompt(
    tokenizer: PreTrainedTokenizerBase, filler: np.ndarray, length: int, rng: random.Random, facts: int
) -> tuple[list[int], list[bool]]:
    """One prompt and its answer mask, both of `length`. The order of the random draws defines the task."""
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
    """Token ids of the whole recall line, and which of them are the digits asked for.

    Raises:
        SurgeryError: the tokens of the question change when the answer follows.
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
