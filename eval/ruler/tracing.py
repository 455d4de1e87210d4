"""Variable tracking: RULER's task `vt`, a chain of assignments that must be followed through noise."""

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
    """A worked example with variables of three letters, then a chain of five variables of five in `size` noise lines.

    RULER fits the example to 500 tokens in steps of five lines, which gives ten lines with the usual tokenizers. Here
    it has ten, and five where the prompt is shorter than any of RULER's, which start at 4096 tokens.
    """
    example = _chain(setting, "example", letters=3, noise=10 if setting.length >= 4096 else LEAST_NOISE)
    chain = _chain(setting, "chain", letters=5, noise=size)
    # Four line ends, as in RULER: two belong to its example and two come before the prompt.
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
