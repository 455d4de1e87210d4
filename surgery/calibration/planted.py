"""Facts planted in calibration text and asked for again, in the words of code or of prose."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from surgery.eval.recall import draw_facts, fact_line, recall_line
from surgery.eval.sequences import tokenize
from surgery.eval.word_lists import ADJECTIVES, NOUNS, draw_distinct

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FACTS = 4
"""Facts planted in a sequence that is long enough for them."""

Wording = Callable[[random.Random, int], list[tuple[str, str]]]
"""Draws so many facts, each as the text that states it and the text that asks for it and answers."""

SENTENCES = (
    (
        "The access code of the {thing} is {value}.",
        "What is the access code of the {thing}? The access code of the {thing} is {value}.",
    ),
    ("Last year the {thing} was sold for {value} dollars.", "How much was paid for the {thing}? {value} dollars."),
    ("The {thing} has the number {value} in the catalog.", "As said above, the number of the {thing} is {value}."),
)


def in_code(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Facts as comments: those that recall prompts ask for."""
    return [(fact_line(name, value), recall_line(name, value)) for name, value in draw_facts(rng, count)]


def in_prose(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Facts as sentences, each in a paragraph of its own; not in the words of recall prompts, which are to measure."""
    things = draw_distinct(rng, lambda rng: f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", count)
    facts = []
    for thing in things:
        stated, question = rng.choice(SENTENCES)
        filled = {"thing": thing, "value": str(rng.randint(10_000, 99_999))}
        facts.append((f"\n\n{stated.format(**filled)}\n\n", f"\n\n{question.format(**filled)}\n\n"))
    return facts


def plant(
    window: list[int], tokenizer: PreTrainedTokenizerBase, rng: random.Random, wording: Wording = in_code
) -> list[int]:
    """Plants facts in a window at random depths and asks for each, answered, somewhere later.

    The window keeps its length: the text's end makes room. Facts that would take more than half of a short window are
    left out, but for the first if it fits at all.
    """
    events: list[tuple[float, list[int]]] = []
    used = 0
    for line, asking in wording(rng, FACTS):
        fact, question = tokenize(tokenizer, line), tokenize(tokenizer, asking)
        used += len(fact) + len(question)
        if used > (len(window) // 2 if events else len(window)):
            break
        depth = rng.uniform(0, 0.8)
        events += [(depth, fact), (rng.uniform(depth + 0.02, 1), question)]
    events.sort(key=lambda event: event[0])

    room = len(window) - sum(len(ids) for _, ids in events)
    planted: list[int] = []
    last = 0
    for depth, ids in events:
        cut = int(depth * room)
        planted += window[last:cut] + ids
        last = cut
    return planted + window[last:room]
