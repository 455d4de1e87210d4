"""Needle in a haystack: retrieval of one fact over a grid of context lengths and depths.

The test of Kamradt (github.com/gkamradt/LLMTest_NeedleInAHaystack, 2023) with the facts of RULER's `niah_single_2`, or
in source code with those of `surgery.eval.recall`. Numbers are random, so only the needle gives the answer, and all
digits must be right. Every prompt has exactly the stated length in tokens, with room for the answer included.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.eval.generation import complete
from surgery.eval.recall import FACT, QUESTION, draw_facts
from surgery.eval.sequences import tokenize
from surgery.eval.session import Session
from surgery.eval.word_lists import ADJECTIVES, NOUNS

if TYPE_CHECKING:
    from surgery.evaluation.task_data import TaskData


ANSWER_TOKENS = 16
"""Tokens for the answer: a number of seven digits, at worst one token each, and a few words before it."""

LONGEST_BY_DEFAULT = 32_768
WITHOUT_LIMIT = 4096

NEAR = 0.05
"""Largest shift of a needle to the end of a sentence, line or word, as a share of the haystack."""


NEEDLES = {
    "text": (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n",
        " One of the special magic numbers for {name} is: {value}.",
        "\nWhat is the special magic number for {name} mentioned in the provided text? "
        "The special magic number for {name} mentioned in the provided text is",
    ),
    "code": ("", FACT, QUESTION),
}
"""Start, needle and question of a prompt by domain; for text those of RULER (Hsieh et al., arXiv:2404.06654)."""


@dataclass(frozen=True)
class NeedlePrompt:
    """Prompt with one needle: token ids, starting with bos if the tokenizer has one, and the number expected."""

    ids: tuple[int, ...]
    value: str


class NeedleHaystack:
    """Tokenized text around the needles, of the domain "text" or "code"."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, domain: str, text: str) -> None:
        self._tokenizer, self._domain = tokenizer, domain
        prose = domain == "text"
        self._ids = np.asarray(tokenize(tokenizer, " ".join(text.split()) if prose else text))
        kinds, kind_of = np.unique(self._ids, return_inverse=True)
        texts = [tokenizer.decode([kind]) for kind in kinds.tolist()]
        # Tokens that start with the space or newline; a needle before them splits no word and no indentation.
        starts = np.asarray([text.startswith(" " if prose else "\n") for text in texts])[kind_of]
        stops = np.asarray([not prose or text.endswith((".", "?", "!")) for text in texts])[kind_of]
        between_words = np.roll(starts, -1)
        self._allowed_cuts = (between_words & stops, between_words)

    def prompt(self, length: int, depth: float, rng: random.Random) -> NeedlePrompt:
        """Build a prompt of `length - ANSWER_TOKENS` tokens with a needle at `depth` percent of the haystack.

        Raises SurgeryError: there is no room for a needle and its question.
        """
        name, value = self._fact(rng)
        head, fact, question = (
            tokenize(self._tokenizer, part.format(name=name, value=value)) for part in NEEDLES[self._domain]
        )
        if self._tokenizer.bos_token_id is not None:
            head = [self._tokenizer.bos_token_id, *head]
        room = length - ANSWER_TOKENS - len(head) - len(fact) - len(question)
        if room < 0:
            raise SurgeryError(
                f"a needle, its question and its answer take {length - room} tokens: "
                f"a needle length of {length} is too small"
            )
        indices = (rng.randrange(len(self._ids)) + np.arange(room)) % len(self._ids)
        text, cut = self._ids[indices].tolist(), self._cut(indices, depth)
        return NeedlePrompt((*head, *text[:cut], *fact, *text[cut:], *question), value)

    def _cut(self, indices: np.ndarray, depth: float) -> int:
        """Return the index of the haystack token before which the needle is inserted."""
        size = len(indices)
        cut = round(size * depth / 100)
        if 0 < cut < size:
            for allowed in self._allowed_cuts:
                cuts = np.flatnonzero(allowed[indices]) + 1
                nearest = cuts[np.abs(cuts - cut).argmin()] if len(cuts) else size
                if abs(nearest - cut) <= NEAR * size:
                    return int(nearest)
        return cut

    def _fact(self, rng: random.Random) -> tuple[str, str]:
        if self._domain == "code":
            return draw_facts(rng, 1)[0]
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}", str(rng.randint(1_000_000, 9_999_999))


def needle_prompts(
    haystack: NeedleHaystack, length: int, depths: Sequence[float], trials: int, seed: int
) -> list[NeedlePrompt]:
    """Build `trials` prompts per depth, each with its own key, number and passage.

    A prompt depends only on its depth and trial, the length and the seed.
    """
    return [
        haystack.prompt(length, depth, random.Random(f"{seed} needle {length} {float(depth)} {trial}"))
        for depth in depths
        for trial in range(trials)
    ]


def default_lengths(limit: int | None) -> tuple[int, ...]:
    """Return 1/4, 1/2, 1 and 3/2 of the model's position limit, which is capped at 32k.

    The length of 3/2 is left out if it exceeds 32k or the model has no limit; a missing limit counts as 4096.
    """
    full = min(limit or WITHOUT_LIMIT, LONGEST_BY_DEFAULT)
    beyond = [limit * 3 // 2] if limit and limit * 3 // 2 <= LONGEST_BY_DEFAULT else []
    return (full // 4, full // 2, full, *beyond)


@dataclass(frozen=True)
class NeedleTask:
    """Needle retrieval over a grid of lengths, of prompt and answer, and depths, in percent of the haystack.

    Each grid cell has ``trials`` prompts. Without a haystack: the Python language reference, for the domain "text"
    only. Raises SurgeryError: the haystack is empty.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    trials: int
    domain: str = "text"
    haystack: str | None = None
    name: ClassVar[str] = "needle"
    native: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.haystack is not None and not self.haystack.strip():
            raise SurgeryError("the haystack text is empty: give a text file with some words in it")

    def settings(self) -> dict[str, Any]:
        """Return the sizes and the hash of the haystack text."""
        return {
            "domain": self.domain,
            "lengths": list(self.lengths),
            "depths": list(self.depths),
            "trials": self.trials,
            "answer_tokens": ANSWER_TOKENS,
            "haystack_sha256": hashlib.sha256(self._text().encode()).hexdigest(),
        }

    def run(self, model: PreTrainedModel, session: Session, kept: None = None) -> dict[str, Any]:
        """Measure the share of needles found in each grid cell.

        Returns "grid": shares [lengths][depths]; "hits": 0 or 1 per prompt, ordered by length, depth and trial;
        "accuracy": mean of all hits; "limit" of the config's positions, "beyond_limit": lengths above it; and
        "lengths", "depths", "trials" and "prompts_sha256". Raises SurgeryError: a length has no room for a needle and
        its question.
        """
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        lengths = list(self.lengths)
        trials = self.trials if session.limit is None else max(1, min(self.trials, session.limit))
        haystack = NeedleHaystack(session.tokenizer, self.domain, self._text())
        prompts = [needle_prompts(haystack, length, self.depths, trials, session.seed) for length in lengths]
        hits = [
            _hits(model, session, row, f"needle, {length} tokens") for length, row in zip(lengths, prompts, strict=True)
        ]
        cells = [[sum(row[start : start + trials]) for start in range(0, len(row), trials)] for row in hits]
        return {
            "lengths": lengths,
            "depths": list(self.depths),
            "trials": trials,
            "grid": [[count / trials for count in row] for row in cells],
            "accuracy": sum(map(sum, hits)) / sum(map(len, hits)),
            "hits": [hit for row in hits for hit in row],
            "limit": limit,
            "beyond_limit": [length for length in lengths if limit is not None and length > limit],
            "prompts_sha256": _sha256(prompt.ids for row in prompts for prompt in row),
        }

    def _text(self) -> str:
        return python_reference() if self.haystack is None else self.haystack


@cache
def python_reference() -> str:
    """Return the Python language reference that ships with `help()`, as English prose that needs no download.

    About 165 kB of sentences, without headings, grammars and examples; copyright Python Software Foundation. The text
    differs between minor versions of Python, so results record its hash.
    """
    from pydoc_data.topics import topics

    paragraphs = (part for name in sorted(topics) for part in re.split(r"\n\s*\n", topics[name]))
    prose = (" ".join(re.sub(r"[*`]|(?<=\w-)\s+", "", part).split()) for part in paragraphs if part[:3] != "   ")
    return "\n".join(dict.fromkeys(part for part in prose if part.endswith((".", "?", "!"))))


def _sha256(prompts: Iterable[Sequence[int]]) -> str:
    """Hash the token ids of prompts in order, as little-endian int64 with -1 after each prompt."""
    digest = hashlib.sha256()
    for ids in prompts:
        digest.update(np.asarray([*ids, -1], dtype="<i8").tobytes())
    return digest.hexdigest()


def _hits(model: PreTrainedModel, session: Session, prompts: list[NeedlePrompt], label: str) -> list[int]:
    outputs = complete(model, session, [prompt.ids for prompt in prompts], ANSWER_TOKENS, label)
    return [
        int(prompt.value in session.tokenizer.decode(output)) for prompt, output in zip(prompts, outputs, strict=True)
    ]


def build(data: TaskData) -> NeedleTask:
    """Build the task from the settings and texts of an evaluation."""
    settings = data.settings
    return NeedleTask(
        lengths=settings.needle_lengths or default_lengths(data.limit),
        depths=settings.needle_depths,
        trials=settings.needle_trials,
        domain=data.domain,
        haystack=data.haystack(),
    )
