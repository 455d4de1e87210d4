"""Online softmax over blocks of logits (Milakov & Gimelshein, arXiv 1805.02867), in base 2.

For each query `m_i` is the running maximum of the logits, initially -∞, and `l_i` the running sum of 2^(logit - m_i),
initially 0. Logits are scaled by log₂ e; masked logits are -∞.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_step(logits, m_i, l_i, TOKENS: tl.constexpr):
    """Update the running softmax with a block of logits, whose tokens are along the axis TOKENS.

    Returns the block's weights, the new `m_i` and `l_i`, and `alpha`, the factor that rescales earlier accumulators.
    """
    m_new = tl.maximum(m_i, tl.max(logits, axis=TOKENS))
    # -∞ - -∞ is NaN for a query without a visible token so far.
    base = tl.where(m_new == -float("inf"), 0.0, m_new)
    weights = tl.exp2(logits - tl.expand_dims(base, TOKENS))
    alpha = tl.exp2(m_i - base)
    return weights, m_new, l_i * alpha + tl.sum(weights, axis=TOKENS), alpha


@triton.jit
def log_of(m_i, l_i):
    """Return the natural logarithm of the sum of exponentials of the logits; -∞ if no token is visible."""
    return tl.where(l_i > 0, (m_i + tl.log2(tl.where(l_i > 0, l_i, 1.0))) * LN2, -float("inf"))
