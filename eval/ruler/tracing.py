"""Variable tracking, RULER's task `vt`: a chain of assignments hidden in noise."""

from __future__ import annotations

import itertools
import random
import string

from surgery.eval.ruler.niah import random_number
from surgery.eval.ruler.sample import Draft, Setting
from surgery.eval.word_lists import draw_distinct

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
    names = draw_distinct(rng, lambda rng: _variable(rng, letters), HOPS + 1)
    value = random_number(rng, 5)
    chain = [domain.root.format(name=names[0], value=value)]
    chain += [domain.hop.format(name=name, source=source) for source, name in itertools.pairwise(names)]
    lines = [domain.noise + domain.assignments_end] * noise
    cuts = sorted(setting.rng(f"{part} places").sample(range(noise), len(chain)))
    for cut, assignment in zip(reversed(cuts), reversed(chain), strict=True):
        lines.insert(cut, assignment)
    context = domain.assignments_join.join(lines)
    return Draft(domain.track.format(context=context, value=value, count=len(names)), tuple(names))


def _variable(rng: random.Random, letters: int) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=letters))
