"""RULER-style suite of eleven tasks, with prompts that fit a context length.

After "RULER: What's the Real Context Size of Your Long-Context Language Models?" (Hsieh et al., arXiv:2404.06654).
Differences:

- `qa_1` and `qa_2`, which need a download, are left out.
- Prose is any text instead of Paul Graham's essays, from a random offset.
- Words come from this package's lists.
- Prompts fill the length up to one haystack unit or a thousandth of the length, instead of up to 500 tokens.
- All keys of a sample are distinct.
- Lengths that are too short for a task raise an error.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from transformers import PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.common.removed import removal
from surgery.eval.haystack import Haystack, largest_fit
from surgery.eval.ruler.domain import Domain
from surgery.eval.ruler.niah import Needles, random_number
from surgery.eval.ruler.sample import Draft, Sample, Setting
from surgery.eval.sequences import tokenize
from surgery.eval.word_lists import ADJECTIVES, NOUNS, VERBS, adjective_noun, draw_distinct

VERSION = 1
"""Version of prompts and scores; part of the settings of every result. Increase it when either changes."""


@dataclass(frozen=True)
class RulerSpec:
    """Specification of one task: function that drafts a sample, and its smallest haystack size.

    ``new_tokens`` of an answer, by domain, are RULER's for text. In code, the answer to a needle starts directly with
    five digits, but variable names take more tokens than with RULER's tokenizers.
    """

    draft: Callable[[Setting, int], Draft]
    least: int
    new_tokens: dict[str, int]


def _needles(code_tokens: int, haystack: str, **options: int | str) -> RulerSpec:
    draft = Needles(haystack, **options)
    return RulerSpec(draft, draft.least, {"text": 128, "code": code_tokens})


HOPS = 4
LEAST_NOISE = HOPS + 1


def draft_tracing(setting: Setting, size: int) -> Draft:
    """Draft a worked example and a chain of five variables in `size` noise lines.

    Variable names have three letters in the example and five in the chain. RULER fits the example to 500 tokens in
    steps of five lines, which gives ten lines with common tokenizers. Here the example has ten lines, or five for
    lengths below 4096 tokens, RULER's shortest.
    """
    example = _chain(setting, "example", letters=3, noise=10 if setting.length >= 4096 else LEAST_NOISE)
    chain = _chain(setting, "chain", letters=5, noise=size)
    # Four newlines, as in RULER: two end the example and two precede the prompt.
    return Draft(f"{example.prompt} {' '.join(example.references)}\n\n\n\n{chain.prompt}", chain.references)


def _chain(setting: Setting, part: str, letters: int, noise: int) -> Draft:
    domain, rng = setting.domain, setting.rng(part)
    names = draw_distinct(rng, lambda rng: "".join(rng.choices(string.ascii_uppercase, k=letters)), HOPS + 1)
    value = random_number(rng, 5)
    chain = [domain.root.format(name=names[0], value=value)]
    chain += [domain.hop.format(name=name, source=source) for source, name in itertools.pairwise(names)]
    lines = [domain.noise + domain.assignments_end] * noise
    cuts = sorted(setting.rng(f"{part} places").sample(range(noise), len(chain)))
    for cut, assignment in zip(reversed(cuts), reversed(chain), strict=True):
        lines.insert(cut, assignment)
    context = domain.assignments_join.join(lines)
    return Draft(domain.track.format(context=context, value=value, count=len(names)), tuple(names))


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
    coded = draw_distinct(rng, lambda rng: "".join(rng.choices(string.ascii_lowercase, k=6)), ranks - 1)
    words = ["...", *coded]
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


TASKS = {
    "niah_single_1": _needles(16, "noise"),
    "niah_single_2": _needles(16, "prose"),
    "niah_single_3": _needles(48, "prose", value_kind="uuids"),
    "niah_multikey_1": _needles(16, "prose", keys=4),
    "niah_multikey_2": _needles(16, "needles"),
    "niah_multikey_3": _needles(48, "needles", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": _needles(48, "prose", values=4),
    "niah_multiquery": _needles(48, "prose", keys=4, asked=4),
    "vt": RulerSpec(draft_tracing, LEAST_NOISE, {"text": 30, "code": 48}),
    "cwe": RulerSpec(draft_common_words, LEAST_WORDS, {"text": 120, "code": 120}),
    "fwe": RulerSpec(draft_frequent_words, LEAST_CODED, {"text": 50, "code": 50}),
}


def build(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int,
    seed: int,
    domain: Domain,
    haystack: Haystack,
) -> list[Sample]:
    """Build `count` samples of a task whose prompts and answers take at most `length` tokens.

    Each sample has the largest haystack that fits, or one that leaves at most a thousandth of the length unused. Sample
    i does not depend on `count`. Raises SurgeryError: the task is unknown, or its smallest sample does not fit.
    """
    check_tasks([task])
    samples: list[Sample] = []
    size = 0
    for index in range(count):
        setting = Setting(domain, haystack, length, seed=f"{seed} {task} {length} {index}")
        sample, size = _fit_sample(task, tokenizer, setting, start=size)
        samples.append(sample)
    return samples


def check_tasks(names: list[str] | tuple[str, ...]) -> None:
    """Raise SurgeryError for an unknown or removed task."""
    for name in names:
        if reason := removal(f"ruler_tasks {name}"):
            raise SurgeryError(f"ruler_tasks {name} {reason}", setting="ruler_tasks")
        if name not in TASKS:
            raise SurgeryError(f"there is no RULER-style task {name!r}: choose from {', '.join(TASKS)}")


def _fit_sample(task: str, tokenizer: PreTrainedTokenizerBase, setting: Setting, start: int) -> tuple[Sample, int]:
    """Return the sample with the largest haystack that fits and the size of the haystack; `start` is a first guess."""
    spec = TASKS[task]
    new_tokens = spec.new_tokens[setting.domain.name]
    room = setting.length - new_tokens
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)

    @cache
    def sample(size: int) -> Sample:
        draft = spec.draft(setting, size)
        ids = (*bos, *tokenize(tokenizer, draft.prompt))
        return Sample(draft.prompt, ids, draft.references, new_tokens)

    least = len(sample(spec.least).ids)
    if least > room:
        raise SurgeryError(
            f"the RULER-style task {task} does not fit in {setting.length} tokens: its smallest sample and the answer "
            f"take {least + new_tokens}; use a greater length or leave the task out"
        )
    size = largest_fit(lambda size: len(sample(size).ids), room, spec.least, start, slack=setting.length // 1000)
    return sample(size), size
