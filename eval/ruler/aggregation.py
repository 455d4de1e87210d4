"""Aggregation tasks of RULER: common words extraction (`cwe`) and frequent words extraction (`fwe`)."""

from __future__ import annotations

import math
import random
import string

from surgery.eval.ruler.sample import Draft, Setting
from surgery.eval.word_lists import ADJECTIVES, NOUNS, VERBS, adjective_noun, draw_distinct

COMMON = 10
LEAST_WORDS = 2 * COMMON
LEAST_CODED = 60
"""Smallest number of coded words for which the fourth rank is more frequent than the fifth."""

WORDS_UP_TO = 8192
"""Largest length in tokens with lists of single words; longer lists need more words than there are."""


def draft_common_words(setting: Setting, size: int) -> Draft:
    """Draft a worked example and a numbered list of `size` distinct words, ten of which are more frequent.

    Ten words occur 30 times and the others 3 times, or 6 times and once for lengths below 4096, as in RULER. Words are
    single words up to `WORDS_UP_TO` tokens, else pairs of an adjective and a noun.
    """
    short = setting.length < 4096
    example, answer = _numbered_list(setting, "example", *((20, 3, 1) if short else (40, 10, 3)))
    solved = setting.domain.common.format(context=example) + _numbered(answer)  # no space in between, as in RULER
    context, common = _numbered_list(setting, "list", size, *((6, 1) if short else (30, 3)))
    return Draft(f"{solved}\n{setting.domain.common.format(context=context)}", tuple(common))


def draft_frequent_words(setting: Setting, size: int) -> Draft:
    """Draft a text of about `size` coded words of six letters; the word of rank k occurs ⌊size / (k² ζ(2))⌋ times.

    Rank 1 is replaced by dots, and the question asks for ranks 2 to 4.
    """
    rng = setting.rng("words")
    ranks = max(10, setting.length // 50)
    words = ["...", *draw_distinct(rng, _coded_word, ranks - 1)]
    zeta_of_2 = math.pi**2 / 6
    text = [word for rank, word in enumerate(words, 1) for _ in range(int(size / rank**2 / zeta_of_2))]
    setting.rng("order").shuffle(text)
    return Draft(setting.domain.frequent.format(context=" ".join(text)), tuple(words[1:4]))


def _numbered_list(setting: Setting, part: str, size: int, often: int, seldom: int) -> tuple[str, list[str]]:
    """Build a numbered list of `size` distinct words; return it with the ten words that occur `often` times."""
    rng = setting.rng(part)
    if setting.length <= WORDS_UP_TO:
        words = sorted(ADJECTIVES + NOUNS + VERBS)
        rng.shuffle(words)
        words = words[:size]
    else:
        words = draw_distinct(rng, adjective_noun, size)
    entries = words[:COMMON] * often + words[COMMON:] * seldom
    setting.rng(f"{part} order").shuffle(entries)
    return _numbered(entries), words[:COMMON]


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _coded_word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=6))
