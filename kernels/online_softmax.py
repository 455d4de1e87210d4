"""The softmax of logits that come block by block (Milakov & Gimelshein, arXiv 1805.02867), in base 2.

For each query `m_i` is its greatest logit so far, -∞ at first, and `l_i` the sum of 2^(logit - m_i), 0 at first.
Logits are scaled by log₂ e; those that a query does not see are -∞.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_step(logits, m_i, l_i, TOKENS: tl.constexpr, SEEN: tl.constexpr = False):
    """Takes a block of logits in, whose axis TOKENS is that of tokens; with SEEN every query has seen some token.

    Returns:
        The block's weights, `m_i`, `l_i`, and `alpha`, by which sums of earlier blocks are rescaled.
    """
    m_new = tl.maximum(m_i, tl.max(logits, axis=TOKENS))
    # A query that has seen nothing yet has no maximum to subtract.
    base = m_new if SEEN else tl.where(m_new == -float("inf"), 0.0, m_new)
    weights = tl.exp2(logits - tl.expand_dims(base, TOKENS))
    alpha = tl.exp2(m_i - base)
    return weights, m_new, l_i * alpha + tl.sum(weights, axis=TOKENS), alpha


@triton.jit
def log_of(m_i, l_i):
    """The natural logarithm of the sum of exponentials of the logits; -∞ of none."""
    return tl.where(l_i > 0, (m_i + tl.log2(tl.where(l_i > 0, l_i, 1.0))) * LN2, -float("inf"))
