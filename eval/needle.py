"""One needle in a haystack, at chosen depths of prompts of chosen lengths.

The test of Kamradt (github.com/gkamradt/LLMTest_NeedleInAHaystack, 2023) with the facts of RULER's `niah_single_2`, or
with those of `surgery.eval.recall` in source code. Numbers are random, so nothing but the needle can give the answer,
and it is right only if all its digits are. Every prompt of a length has exactly that many tokens, answer included.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.eval.recall import draw_facts
from surgery.eval.ruler.domain import Domain
from surgery.eval.ruler.niah import random_number
from surgery.eval.sequences import tokenize
from surgery.eval.word_lists import adjective_noun

ANSWER_TOKENS = 16
"""Room for a number of seven digits, a token each at worst, and for a few words before it."""

LONGEST_BY_DEFAULT = 32_768
WITHOUT_LIMIT = 4096

NEAR = 0.05
"""A needle goes to the nearest end of a sentence or line, or else of a word, if it is within this share of the text."""


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt with one needle.

    Attributes:
        ids: token ids, with bos if the tokenizer has one.
        value: the number to be found in the answer.
    """

    ids: tuple[int, ...]
    value: str


class NeedleHaystack:
    """The text around the needles, as tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, domain: Domain, text: str) -> None:
        """Raises SurgeryError if `text` is empty."""
        self._tokenizer, self._domain = tokenizer, domain
        self._blank = domain.split(text).separator
        self._ids = np.asarray(tokenize(tokenizer, " ".join(text.split()) if self._blank else text))
        kinds, kind_of = np.unique(self._ids, return_inverse=True)
        texts = [tokenizer.decode([kind]) for kind in kinds.tolist()]
        # Where the next token starts with the blank or the line end, so that a needle tears no word and no indentation.
        starts = np.asarray([text.startswith(self._blank or "\n") for text in texts])[kind_of]
        stops = np.asarray([not self._blank or text.endswith((".", "?", "!")) for text in texts])[kind_of]
        between_words = np.roll(starts, -1)
        self._places_for_needles = (between_words & stops, between_words)

    def prompt(self, length: int, depth: float, rng: random.Random) -> NeedlePrompt:
        """A prompt of `length` - `ANSWER_TOKENS` tokens with a needle at `depth` percent of the haystack.

        Raises:
            SurgeryError: there is no room for a needle and its question.
        """
        key, value = self._fact(rng)
        before, after = self._domain.find_one.split("{context}")
        needle = self._blank + self._domain.needle.format(kind="numbers", key=key, value=value)
        head, fact, question = (
            tokenize(self._tokenizer, part.format(kind="number", query=key)) for part in (before, needle, after)
        )
        if self._tokenizer.bos_token_id is not None:
            head = [self._tokenizer.bos_token_id, *head]
        room = length - ANSWER_TOKENS - len(head) - len(fact) - len(question)
        if room < 0:
            raise SurgeryError(
                f"a needle, its question and its answer take {length - room} tokens: "
                f"a needle length of {length} is too small"
            )
        places = (rng.randrange(len(self._ids)) + np.arange(room)) % len(self._ids)
        text, cut = self._ids[places].tolist(), self._cut(places, depth)
        return NeedlePrompt((*head, *text[:cut], *fact, *text[cut:], *question), value)

    def _cut(self, places: np.ndarray, depth: float) -> int:
        """Before which token of the haystack the needle goes."""
        size = len(places)
        cut = round(size * depth / 100)
        if 0 < cut < size:
            for allowed in self._places_for_needles:
                found = np.flatnonzero(allowed[places]) + 1
                nearest = found[np.abs(found - cut).argmin()] if len(found) else size
                if abs(nearest - cut) <= NEAR * size:
                    return int(nearest)
        return cut

    def _fact(self, rng: random.Random) -> tuple[str, str]:
        if self._domain.name == "code":
            return draw_facts(rng, 1)[0]
        return adjective_noun(rng), random_number(rng, self._domain.digits)


def needle_prompts(
    haystack: NeedleHaystack, length: int, depths: Sequence[float], trials: int, seed: int
) -> list[NeedlePrompt]:
    """`trials` prompts for every depth in turn, each with another key, number and passage.

    Prompt (depth, trial) depends on them, the length and the seed alone.
    """
    return [
        haystack.prompt(length, depth, random.Random(f"{seed} needle {length} {float(depth)} {trial}"))
        for depth in depths
        for trial in range(trials)
    ]


def default_lengths(limit: int | None) -> tuple[int, ...]:
    """A quarter, a half, all and one and a half of a model's limit, without those above 32k tokens.

    A limit above that counts as 32k, and a model without any limit as one of 4096 that is not exceeded.
    """
    full = min(limit or WITHOUT_LIMIT, LONGEST_BY_DEFAULT)
    beyond = [limit * 3 // 2] if limit and limit * 3 // 2 <= LONGEST_BY_DEFAULT else []
    return (full // 4, full // 2, full, *beyond)
