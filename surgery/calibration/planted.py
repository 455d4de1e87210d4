"""Facts planted in calibration text, with questions for them, as code or as prose."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from surgery.eval.recall import draw_facts, fact_line, recall_line
from surgery.eval.sequences import tokenize
from surgery.eval.word_lists import ADJECTIVES, NOUNS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FACTS = 4
"""Facts to plant in a sequence, if it is long enough."""

Wording = Callable[[random.Random, int], list[tuple[str, str]]]
"""Function that draws facts, each as a statement and as a question with its answer."""

SENTENCES = (
    (
        "The access code of the {thing} is {value}.",
        "What is the access code of the {thing}? The access code of the {thing} is {value}.",
    ),
    ("Last year the {thing} was sold for {value} dollars.", "How much was paid for the {thing}? {value} dollars."),
    ("The {thing} has the number {value} in the catalog.", "As said above, the number of the {thing} is {value}."),
)


def in_code(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Draw facts as comments, in the wording of recall prompts."""
    return [(fact_line(name, value), recall_line(name, value)) for name, value in draw_facts(rng, count)]


def in_prose(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Draw facts as sentences, each in its own paragraph; the wording differs from recall prompts, which measure."""
    things: dict[str, None] = {}
    while len(things) < count:
        things[f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"] = None
    facts = []
    for thing in things:
        stated, question = rng.choice(SENTENCES)
        filled = {"thing": thing, "value": str(rng.randint(10_000, 99_999))}
        facts.append((f"\n\n{stated.format(**filled)}\n\n", f"\n\n{question.format(**filled)}\n\n"))
    return facts


def plant(
    window: list[int], tokenizer: PreTrainedTokenizerBase, rng: random.Random, wording: Wording = in_code
) -> list[int]:
    """Plant facts in a window at random depths, and a question with its answer for each at a later depth.

    The window keeps its length: the end of its text is cut off. Facts that would exceed half of the window are left
    out, except for the first if it fits.
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
