"""Haystack texts, and a search for the largest haystack that fits a prompt length."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

REPEATED_SENTENCE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Noise text of RULER (arXiv:2404.06654) and of passkey retrieval (Mohtashami & Jaggi, arXiv:2305.16300)."""


@dataclass(frozen=True)
class Haystack:
    """Text as a circular sequence of units, words or lines with their newline, from which passages of any size are cut.

    ``separator`` joins units and sentences: a space or empty. Facts are inserted only after units that end a sentence.
    """

    units: tuple[str, ...]
    separator: str
    ends: tuple[bool, ...]

    @classmethod
    def of_words(cls, text: str) -> Haystack:
        """Split prose into words; sentences end with a period, a question mark or an exclamation mark."""
        words = tuple(text.split())
        return cls(words, " ", tuple(word[-1] in ".?!" for word in words))

    @classmethod
    def of_lines(cls, text: str) -> Haystack:
        """Split source code into its non-blank lines, each of which is a unit and a sentence."""
        lines = tuple(line.rstrip() + "\n" for line in text.splitlines() if line.strip())
        return cls(lines, "", (True,) * len(lines))

    def sentences(self, start: int, count: int) -> list[str]:
        """Return `count` consecutive units as sentences; the last sentence may be cut short.

        The passage begins at the first sentence start at or after unit `start` and wraps around at the end of the
        text, so `start` may be any integer. With the same `start`, a shorter passage is a prefix of a longer one.
        """
        size = len(self.units)
        start = next((index for index in range(start, start + size) if self.ends[(index - 1) % size]), start)
        complete, sentence = [], []
        for index in range(start, start + count):
            sentence.append(self.units[index % size])
            if self.ends[index % size]:
                complete.append(self.separator.join(sentence))
                sentence = []
        return [*complete, self.separator.join(sentence)] if sentence else complete


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


def largest_fit(measure: Callable[[int], int], room: int, least: int, start: int, slack: int = 0) -> int:
    """Find the largest size >= `least` for which `measure(size) <= room`; `measure` must not decrease.

    The bracket narrows by interpolation from `start`, and by bisection at every third step, so the search terminates.
    It stops early at a size whose measure is at least `room - slack`. The returned size was measured to fit.
    """
    fits, fits_at = least, measure(least)
    over = over_at = None
    probe, steps = max(start, least + 1), 0
    while room - fits_at > slack and (over is None or over - fits > 1):
        measured = measure(probe)
        if measured <= room:
            if measured <= fits_at and probe >= least + 64 + 4 * room:
                return probe  # the prompt no longer grows with the haystack
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
            # Probe slightly beyond the estimate, on the side of the farther end, so that both ends close in.
            nearer = 1 + ahead / 16 if ahead < (over - fits) / 2 else -(over - fits - ahead) / 16
            probe = min(max(fits + int(ahead + nearer), fits + 1), over - 1)
    return fits
