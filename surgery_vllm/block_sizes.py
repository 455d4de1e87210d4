"""Tokens of a block, where some heads keep all tokens and the others stream.

Those are two groups of vLLM's cache, and it hands both blocks of one size in bytes. A group of fewer heads therefore
has blocks of more tokens.
"""

from fractions import Fraction
from itertools import count

# Share of a block that may stay empty.
WASTED = 0.01


def block_sizes(full_heads: int, streaming_heads: int, tokens: int) -> tuple[int, int]:
    """Tokens of a block of full heads and of one of streaming heads, at most `tokens` where the ratio allows.

    The blocks weigh the same but for ``WASTED``, at the smallest numbers that do: prefixes are found again in steps
    of their least common multiple.
    """
    if not full_heads or not streaming_heads:
        return tokens, tokens
    for parts in count(1):
        ratio = Fraction(streaming_heads, full_heads).limit_denominator(parts)
        full, streaming = ratio.numerator, ratio.denominator
        weights = full * full_heads, streaming * streaming_heads
        if min(weights) >= (1 - WASTED) * max(weights):
            scale = max(tokens // max(full, streaming), 1)
            return full * scale, streaming * scale
    raise AssertionError("the exact ratio wastes nothing")
