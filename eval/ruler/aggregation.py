"""Aggregation: RULER's tasks of common words (`cwe`) and frequent words (`fwe`), which no single place answers."""

from __future__ import annotations

import math
import random
import string

from surgery.eval.ruler.sample import Draft, Setting
from surgery.eval.word_lists import ADJECTIVES, NOUNS, VERBS, adjective_noun, draw_distinct

COMMON = 10
LEAST_WORDS = 2 * COMMON
LEAST_CODED = 60
"""Words of the coded text from which on the fourth rank is more frequent than the fifth."""

WORDS_UP_TO = 8192
"""Tokens of the longest list of single words; there are too few of them for longer ones."""


def draft_common_words(setting: Setting, size: int) -> Draft:
    """A worked example, then a numbered list of `size` different words, ten of which stand there more often.

    Ten words occur 30 times and the others 3 times; 6 and 1 times where the length is below 4096, as in RULER. They are
    single words, and pairs of an adjective and a noun in lists too long for that.
    """
    short = setting.length < 4096
    example, answer = _numbered_list(setting, "example", *((20, 3, 1) if short else (40, 10, 3)))
    solved = setting.domain.common.format(context=example) + _numbered(answer)  # without a blank, as in RULER
    context, common = _numbered_list(setting, "list", size, *((6, 1) if short else (30, 3)))
    return Draft(f"{solved}\n{setting.domain.common.format(context=context)}", tuple(common))


def draft_frequent_words(setting: Setting, size: int) -> Draft:
    """About `size` coded words of six letters, of which the word of rank k occurs size / (k² ζ(2)) times, rounded down.

    The first rank is shown as dots and the next three are asked for.
    """
    rng = setting.rng("words")
    ranks = max(10, setting.length // 50)
    words = ["...", *draw_distinct(rng, _coded_word, ranks - 1)]
    zeta_of_2 = math.pi**2 / 6
    text = [word for rank, word in enumerate(words, 1) for _ in range(int(size / rank**2 / zeta_of_2))]
    setting.rng("order").shuffle(text)
    return Draft(setting.domain.frequent.format(context=" ".join(text)), tuple(words[1:4]))


def _numbered_list(setting: Setting, part: str, size: int, often: int, seldom: int) -> tuple[str, list[str]]:
    """The list with `size` different words, and the ten that stand there `often`."""
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
