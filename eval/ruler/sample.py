"""RULER-style samples and their scores."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from surgery.eval.haystack import Haystack
from surgery.eval.ruler.domain import Domain


@dataclass(frozen=True)
class Setting:
    """Settings of a sample, except for the size of its haystack, a text of the domain.

    Prompt and answer have at most ``length`` tokens; the seed contains the task, the length and the sample's index.
    """

    domain: Domain
    haystack: Haystack
    length: int
    seed: str

    def rng(self, part: str) -> random.Random:
        """Return the random generator of one part of the sample.

        Facts, haystack and positions have separate generators, so a larger haystack only adds text and changes no fact.
        The prompt length therefore grows with the haystack, which the search for the largest fit relies on.
        """
        return random.Random(f"{self.seed} {part}")


@dataclass(frozen=True)
class Draft:
    """Prompt up to the start of the answer, with strings expected in it; its length has not been checked yet."""

    prompt: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """Prompt that fits the length.

    Attributes:
        prompt: text of the prompt.
        ids: token ids of the prompt, starting with bos if the tokenizer has one.
        references: strings expected in the answer.
        new_tokens: maximum tokens of the answer.
    """

    prompt: str
    ids: tuple[int, ...]
    references: tuple[str, ...]
    new_tokens: int

    def score(self, output: str) -> float:
        """Compute RULER's score: the share of references, 0 to 1, that occur in `output`, ignoring case."""
        return sum(reference.lower() in output.lower() for reference in self.references) / len(self.references)


def prompts_sha256(prompts: Iterable[Sequence[int]]) -> str:
    """Hash the token ids of prompts in order, as little-endian int64 with -1 after each prompt."""
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update(np.asarray([*ids, -1], dtype="<i8").tobytes())
    return digest.hexdigest()
