"""Default sizes of the benchmark, and parsing of sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Names of shapes, context lengths and batch sizes."""

    models: tuple[str, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]


DEFAULTS = Sizes(("llama2-7b", "llama3-8b", "qwen2.5-7b"), (8_192, 32_768, 131_072), (1, 8, 32))
TINY = Sizes(("tiny",), (63, 100), (1, 3))
"""Sizes for machines without a GPU."""


def numbers(text: str) -> list[int]:
    """Parse a list such as `8k,32768`; k stands for 1024. Raises ValueError: an item that is no positive integer."""
    values = []
    for word in text.split(","):
        plain = word.strip().lower()
        factor = 1024 if plain.endswith("k") else 1
        digits = plain.removesuffix("k")
        if not digits.isdigit() or int(digits) < 1:
            raise ValueError(f"{word.strip()!r} is not a positive integer such as 8 or 32k")
        values.append(int(digits) * factor)
    return values
