"""Text to hide facts in, and how much of it fits in a prompt of a given length."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from surgery.common.errors import SurgeryError

REPEATED_SENTENCE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The noise of RULER (arXiv:2404.06654) and of passkey retrieval before it (Mohtashami & Jaggi, arXiv:2305.16300)."""


@dataclass(frozen=True)
class Haystack:
    """A text as a ring of small units, from which passages of any size are cut.

    Attributes:
        units: words, or lines with their ends.
        separator: what joins units, and sentences: a space or nothing.
        ends: for each unit, whether a sentence ends with it; a fact is only ever put after such a unit.
    """

    units: tuple[str, ...]
    separator: str
    ends: tuple[bool, ...]

    @classmethod
    def of_words(cls, text: str) -> Haystack:
        """Prose: units are words, and sentences end with a full stop, a question or an exclamation mark.

        Raises:
            SurgeryError: the text is empty.
        """
        words = tuple(text.split())
        return cls(_some(words), " ", tuple(word[-1] in ".?!" for word in words))

    @classmethod
    def of_lines(cls, text: str) -> Haystack:
        """Source code: units and sentences are lines that are not blank.

        Raises:
            SurgeryError: the text is empty.
        """
        lines = tuple(line.rstrip() + "\n" for line in text.splitlines() if line.strip())
        return cls(_some(lines), "", (True,) * len(lines))

    def sentences(self, start: int, count: int) -> list[str]:
        """`count` units as sentences, the last one possibly cut short; after the last unit comes the first again.

        They start at the first sentence from unit `start` on, a number of any size. A longer passage starts with the
        shorter one.
        """
        size = len(self.units)
        start = next((place for place in range(start, start + size) if self.ends[(place - 1) % size]), start)
        complete, sentence = [], []
        for place in range(start, start + count):
            sentence.append(self.units[place % size])
            if self.ends[place % size]:
                complete.append(self.separator.join(sentence))
                sentence = []
        return [*complete, self.separator.join(sentence)] if sentence else complete


@cache
def python_reference() -> str:
    """English prose that is on every machine: the Python language reference, as `help()` carries it.

    About 165 kB in sentences, without headings, grammars and examples; copyright Python Software Foundation. It differs
    between minor versions of Python, so results state its hash.
    """
    from pydoc_data.topics import topics

    paragraphs = (part for name in sorted(topics) for part in re.split(r"\n\s*\n", topics[name]))
    prose = (" ".join(re.sub(r"[*`]|(?<=\w-)\s+", "", part).split()) for part in paragraphs if part[:3] != "   ")
    return "\n".join(dict.fromkeys(part for part in prose if part.endswith((".", "?", "!"))))


def largest_fit(measure: Callable[[int], int], room: int, least: int, start: int, slack: int = 0) -> int:
    """The largest size from `least` on whose measure is at most `room`, where `measure` grows with the size.

    The search ends for every function: the bracket narrows at each step by interpolation and at every third step by
    half, and a measure that stops growing ends the search for an upper bound. What is returned was measured to fit.

    Args:
        measure: for example the tokens of a prompt with that much haystack.
        least: known to fit.
        start: a guess.
        slack: a size whose measure falls short of `room` by no more than this is taken as well.
    """
    fits, fits_at = least, measure(least)
    over = over_at = None
    probe, steps = max(start, least + 1), 0
    while room - fits_at > slack and (over is None or over - fits > 1):
        measured = measure(probe)
        if measured <= room:
            if measured <= fits_at and probe >= least + 64 + 4 * room:
                return probe  # more haystack makes no longer prompt
            slope = (measured - fits_at) / (probe - fits)
            fits, fits_at = probe, measured
        else:
            slope = (measured - fits_at) / (probe - fits)
            over, over_at = probe, measured
        steps += 1
        if over is None:
            ahead = int(1.05 * (room - fits_at) / slope) + 1 if slope > 0 else 2 * fits + 1
            probe = fits + min(ahead, 4 * fits + 64)
        elif steps % 3 == 0:
            probe = (fits + over) // 2
        else:
            ahead = (room - fits_at) / (over_at - fits_at) * (over - fits)
            # Just past the estimate on the far side, so that both ends of the bracket close in.
            nearer = 1 + ahead / 16 if ahead < (over - fits) / 2 else -(over - fits - ahead) / 16
            probe = min(max(fits + int(ahead + nearer), fits + 1), over - 1)
    return fits


def _some(units: tuple[str, ...]) -> tuple[str, ...]:
    if not units:
        raise SurgeryError("the haystack text is empty: give a text file with some words in it")
    return units
