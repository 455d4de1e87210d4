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

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from transformers import PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.common.removed import removal
from surgery.eval.haystack import Haystack, largest_fit
from surgery.eval.ruler.aggregation import LEAST_CODED, LEAST_WORDS, draft_common_words, draft_frequent_words
from surgery.eval.ruler.domain import Domain
from surgery.eval.ruler.niah import Needles
from surgery.eval.ruler.sample import Draft, Sample, Setting
from surgery.eval.ruler.tracing import LEAST_NOISE, draft_tracing
from surgery.eval.sequences import tokenize

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
