"""Sequences with planted facts and a question for each at the end, for scoring retrieval heads.

The facts are those of :mod:`surgery.eval.recall`. Their placement is DuoAttention's passkey task (Xiao et al.,
arXiv:2410.10819, §2.3): distinct depths between 5% and 95% of the text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import BoolTensor, LongTensor
from transformers import PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.eval.recall import answered_question, draw_facts, fact_line, recall_line
from surgery.eval.sequences import check_longer_than, tokenize

DEPTHS = 0.05, 0.95


@dataclass(frozen=True)
class NeedleSet:
    """N sequences of T tokens [N, T] int64 with F facts each.

    Attributes:
        answers: [N, T] bool, True at the answers' digits (the predicted tokens, not the predicting positions).
        fact_numbers: [N, T] int64, index of the fact at its answer's tokens, -1 elsewhere.
        spans: [N, F, 2] int64, token range [start, stop) of each fact's line.
    """

    tokens: LongTensor
    answers: BoolTensor
    fact_numbers: LongTensor
    spans: LongTensor


def needle_sequences(
    tokenizer: PreTrainedTokenizerBase, filler: Sequence[int], count: int, length: int, facts: int, seed: int
) -> NeedleSet:
    """Build ``count`` sequences of ``length`` tokens: bos if the tokenizer has one, text with facts, questions.

    Windows of ``filler`` are drawn at random; there are fewer facts if they would exceed half of a sequence. Raises
    SurgeryError: the text is too short, or a sequence has no room for one fact.
    """
    if count < 1:
        raise SurgeryError(f"samples must be at least 1, not {count}")
    check_longer_than(len(filler), length)
    facts = min(facts, _room_for(tokenizer, length))
    rng = random.Random(seed)
    rows = [_sequence(tokenizer, filler, length, facts, rng) for _ in range(count)]
    tokens, numbers, spans = (torch.tensor(part, dtype=torch.long) for part in zip(*rows, strict=True))
    return NeedleSet(tokens, numbers >= 0, numbers, spans)


def _room_for(tokenizer: PreTrainedTokenizerBase, length: int) -> int:
    """Return the number of facts that fit in half of a sequence."""
    pair = ("buffer", "88888")
    each = len(tokenize(tokenizer, fact_line(*pair))) + len(tokenize(tokenizer, recall_line(*pair))) + 4
    if each > length // 2:
        raise SurgeryError(f"sequences of {length} tokens have no room for a planted fact; raise --length")
    return length // 2 // each


def _sequence(
    tokenizer: PreTrainedTokenizerBase, filler: Sequence[int], length: int, facts: int, rng: random.Random
) -> tuple[list[int], list[int], list[list[int]]]:
    """Return the tokens, the fact index at each token, and the facts' spans."""
    pairs = draw_facts(rng, facts)
    planted = [tokenize(tokenizer, fact_line(*pair)) for pair in pairs]
    order = rng.sample(range(facts), facts)
    questions, numbers = [], []
    for number in order:
        line, answer = answered_question(tokenizer, *pairs[number])
        questions += line
        numbers += [number if position in answer else -1 for position in range(len(line))]
    row = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = length - len(row) - sum(map(len, planted)) - len(questions)
    start = rng.randint(0, len(filler) - length - 1)
    text = list(filler[start : start + room])
    low, high = (int(depth * room) for depth in DEPTHS)
    cuts = sorted(rng.sample(range(low, high), facts))
    spans, last = [], 0
    for cut, line in zip(cuts, planted, strict=True):
        row += text[last:cut]
        spans.append([len(row), len(row) + len(line)])
        row += line
        last = cut
    row += text[last:]
    return row + questions, [-1] * len(row) + numbers, spans
