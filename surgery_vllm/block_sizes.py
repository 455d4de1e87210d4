"""Block sizes of full and streaming heads.

They form two KV cache groups of vLLM, whose blocks have one size in bytes. So the group with fewer heads has blocks of
more tokens.
"""

from fractions import Fraction
from itertools import count

# Largest unused share of a block.
WASTED = 0.01


def block_sizes(full_heads: int, streaming_heads: int, tokens: int) -> tuple[int, int]:
    """Return the tokens of a block of full heads and of streaming heads, at most `tokens` if the ratio allows.

    Both blocks have the same bytes up to ``WASTED``. The ratio has the smallest terms possible, since prefix hits have
    the granularity of the least common multiple.
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
