"""Needle-in-a-haystack tasks: eight of RULER's tasks."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass

import numpy as np

from surgery.eval.recall import NAMES
from surgery.eval.ruler.sample import Draft, Setting
from surgery.eval.word_lists import adjective_noun, draw_distinct

DEPTHS = tuple(np.round(np.linspace(0, 100, 40)).astype(int).tolist())
"""Depths at which needles are inserted into prose, in percent of its sentences."""


@dataclass(frozen=True)
class Needles:
    """One needle-in-a-haystack task; calling it drafts a prompt with a haystack of a given size.

    The haystack is "noise" (one line), "prose" or "needles" (distractors). Of the distinct keys ("words" or "uuids"),
    each with ``values`` ("numbers" or "uuids"), the question asks for all values of ``asked``.
    """

    haystack: str
    keys: int = 1
    values: int = 1
    asked: int = 1
    key_kind: str = "words"
    value_kind: str = "numbers"

    @property
    def least(self) -> int:
        """Smallest haystack size: one unit of prose, or one line per needle."""
        return 1 if self.haystack == "prose" else self.keys * self.values

    def __call__(self, setting: Setting, size: int) -> Draft:
        """Draft a prompt with `size` lines of noise or distractors, or `size` units of prose."""
        domain, rng = setting.domain, setting.rng("facts")
        keys = draw_distinct(rng, lambda rng: self._key(rng, setting), self.keys)
        facts = {key: draw_distinct(rng, lambda rng: self._value(rng, setting), self.values) for key in keys}
        needles = [self._needle(setting, key, value) for key in keys for value in facts[key]]
        rng.shuffle(needles)
        queries = rng.sample(keys, self.asked)
        query = queries[0] if len(queries) == 1 else ", ".join(queries[:-1]) + ", and " + queries[-1]
        references = tuple(value for key in queries for value in facts[key])

        several = len(references) > 1
        prompt = (domain.find_all if several else domain.find_one).format(
            kind=self.value_kind if several else self.value_kind.removesuffix("s"),
            context=self._context(setting, size, needles, set(keys)),
            query=query,
        )
        return Draft(prompt, references)

    def _context(self, setting: Setting, size: int, needles: list[str], used_keys: set[str]) -> str:
        domain, rng, cut_rng = setting.domain, setting.rng("haystack"), setting.rng("places")
        if self.haystack == "prose":
            lines = setting.haystack.sentences(rng.randrange(len(setting.haystack.units)), size)
            cuts = sorted(int(len(lines) * depth / 100) for depth in cut_rng.sample(DEPTHS, len(needles)))
            join = setting.haystack.separator
        else:
            if self.haystack == "noise":
                lines = [domain.noise] * size
            else:
                keys = draw_distinct(rng, lambda rng: self._key(rng, setting), size + len(used_keys))
                keys = [key for key in keys if key not in used_keys][:size]
                values = setting.rng("distractors")
                lines = [self._needle(setting, key, self._value(values, setting)) for key in keys]
            cuts = sorted(cut_rng.sample(range(size), len(needles)))
            join = domain.join
        for cut, needle in zip(reversed(cuts), reversed(needles), strict=True):
            lines.insert(cut, needle)
        return join.join(lines)

    def _needle(self, setting: Setting, key: str, value: str) -> str:
        return setting.domain.needle.format(kind=self.value_kind, key=key, value=value)

    def _key(self, rng: random.Random, setting: Setting) -> str:
        if self.key_kind == "uuids":
            return random_uuid(rng)
        if setting.domain.name == "text":
            return adjective_noun(rng)
        if self.haystack != "needles":
            return rng.choice(NAMES)
        # Distractors need more keys than the 24 names: pairs give 552, triples 12 thousand, quadruples 255 thousand.
        return "_".join(rng.sample(NAMES, 2 if setting.length <= 4096 else 3 if setting.length <= 65536 else 4))

    def _value(self, rng: random.Random, setting: Setting) -> str:
        return random_uuid(rng) if self.value_kind == "uuids" else random_number(rng, setting.domain.digits)


def random_number(rng: random.Random, digits: int) -> str:
    """Draw a number with `digits` digits and no leading zero."""
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def random_uuid(rng: random.Random) -> str:
    """Draw a version 4 uuid from `rng`."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
