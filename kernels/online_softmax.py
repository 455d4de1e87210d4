"""The softmax of logits that come block by block (Milakov & Gimelshein, arXiv 1805.02867), in base 2.

For each query `most` is its greatest logit so far, -∞ at first, and `total` the sum of 2^(logit - most), 0 at first.
Logits are scaled by log₂ e; those that a query does not see are -∞.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_step(logits, most, total, TOKENS: tl.constexpr, SEEN: tl.constexpr = False):
    """Takes a block of logits in, whose axis TOKENS is that of tokens; with SEEN every query has seen some token.

    Returns:
        The block's weights, `most`, `total`, and what sums of earlier blocks shrink by.
    """
    highest = tl.maximum(most, tl.max(logits, axis=TOKENS))
    # A query that has seen nothing yet has no maximum to subtract.
    base = highest if SEEN else tl.where(highest == -float("inf"), 0.0, highest)
    weights = tl.exp2(logits - tl.expand_dims(base, TOKENS))
    shrink = tl.exp2(most - base)
    return weights, highest, total * shrink + tl.sum(weights, axis=TOKENS), shrink


@triton.jit
def log_of(most, total):
    """The natural logarithm of the sum of exponentials of the logits; -∞ of none."""
    return tl.where(total > 0, (most + tl.log2(tl.where(total > 0, total, 1.0))) * LN2, -float("inf"))
