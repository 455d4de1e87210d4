"""RULER-style samples: their parts, and how an answer is scored."""

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
    """Settings of a sample besides the size of its haystack.

    Attributes:
        domain: wording.
        haystack: text of the domain.
        length: tokens of prompt and answer together, at most.
        seed: equal seeds give equal samples; the task, the length and the number of the sample are part of it.
    """

    domain: Domain
    haystack: Haystack
    length: int
    seed: str

    def rng(self, part: str) -> random.Random:
        """Random numbers for one part of the sample.

        Facts, haystack and places have their own, so that a larger haystack changes no fact and only adds text. That
        makes the length of the prompt grow with the haystack, which the fit relies on.
        """
        return random.Random(f"{self.seed} {part}")


@dataclass(frozen=True)
class Draft:
    """A prompt with a haystack of some size.

    Attributes:
        prompt: all of it, up to where the answer starts.
        references: the strings to be found in the answer.
    """

    prompt: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """A prompt that fits.

    Attributes:
        prompt: text.
        ids: its token ids, with bos if the tokenizer has one.
        references: the strings to be found in the answer.
        new_tokens: how many tokens the answer may take.
    """

    prompt: str
    ids: tuple[int, ...]
    references: tuple[str, ...]
    new_tokens: int

    def score(self, output: str) -> float:
        """RULER's score: the share of references, 0 to 1, that occur in `output`, whatever their case."""
        return sum(reference.lower() in output.lower() for reference in self.references) / len(self.references)


def prompts_sha256(prompts: Iterable[Sequence[int]]) -> str:
    """Hash of the token ids of prompts in their order: little-endian int64, and -1 after each prompt."""
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update(np.asarray([*ids, -1], dtype="<i8").tobytes())
    return digest.hexdigest()
