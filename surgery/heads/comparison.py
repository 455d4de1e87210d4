"""How much patterns of one model agree, beside what chance would give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor

from surgery.common.errors import SurgeryError
from surgery.heads.pattern import HeadPattern, count_of

SHARES = 0.125, 0.25, 0.5, 0.75
BITS = {"float32": 23, "bfloat16": 7}
"""Bits of the fraction of a number, which decide how near two different ones can be."""


def compare(patterns: Mapping[str, HeadPattern], shares: Sequence[float] = SHARES) -> dict[str, Any]:
    """Compares patterns by name.

    Returns:
        Plain values. ``layers``, ``kv_heads``, ``shares``. ``patterns``: for each name its method, its number of
        different scores (``distinct``), and for each share the threshold, which is the score of the last head above it,
        and how many heads lie within one unit in the last place of it, in float32 and in bfloat16, itself included:
        above 1, which heads are kept is partly a matter of rounding. ``pairs``: for every two of them Spearman's rank
        correlation (equal scores share the mean of their ranks; None if a pattern has one score only), and for each
        share the overlap |A ∩ B| / k of the k best heads, with the mean and the standard deviation of a random
        choice (hypergeometric).

    Raises:
        SurgeryError: there is no pattern, their shapes differ, or a share keeps no head.
    """
    if not patterns:
        raise SurgeryError("no patterns to compare: name at least one")
    shapes = {name: tuple(pattern.scores.shape) for name, pattern in patterns.items()}
    (first, shape), *others = shapes.items()
    for name, other in others:
        if other != shape:
            raise SurgeryError(
                f"{name} has {other[0]} layers of {other[1]} KV heads and {first} {shape[0]} of {shape[1]}: "
                "patterns of one model are needed"
            )
    heads = shape[0] * shape[1]
    counts = {share: count_of(share, heads) for share in shares}
    for share, count in counts.items():
        if not 1 <= count <= heads:
            raise SurgeryError(
                f"share {share} of {heads} heads is {count} heads: from 1 to all of them can be compared"
            )
    return {
        "layers": shape[0],
        "kv_heads": shape[1],
        "shares": list(shares),
        "patterns": {name: _alone(pattern, counts) for name, pattern in patterns.items()},
        "pairs": [_pair(a, b, patterns[a], patterns[b], counts) for a, b in combinations(patterns, 2)],
    }


def spearman(a: Tensor, b: Tensor) -> float | None:
    """Spearman's rank correlation of two score tensors of one shape; None if all values of one are equal."""
    ranks = [_ranks(scores) for scores in (a, b)]
    a, b = (rank - rank.mean() for rank in ranks)
    scale = (a.square().sum() * b.square().sum()).sqrt()
    return (a @ b / scale).item() if scale else None


def near_threshold(scores: Tensor, count: int, bits: int) -> int:
    """Heads whose score lies within one unit in the last place, of numbers with ``bits`` of fraction, of the
    ``count``-th best, itself included."""
    values = scores.double().flatten()
    threshold = values.sort(descending=True).values[count - 1]
    ulp = math.ldexp(1.0, max(math.frexp(threshold.item())[1] - 1, -126) - bits)
    return int(((values - threshold).abs() <= ulp).sum())


def _alone(pattern: HeadPattern, counts: Mapping[float, int]) -> dict[str, Any]:
    ordered = pattern.scores.flatten().sort(descending=True).values
    return {
        "method": pattern.method,
        "distinct": len(ordered.unique()),
        "thresholds": [
            {
                "share": share,
                "heads": count,
                "score": ordered[count - 1].item(),
                "near": {name: near_threshold(pattern.scores, count, bits) for name, bits in BITS.items()},
            }
            for share, count in counts.items()
        ],
    }


def _pair(a: str, b: str, one: HeadPattern, other: HeadPattern, counts: Mapping[float, int]) -> dict[str, Any]:
    rankings, overlaps = (one.ranking(), other.ranking()), []
    heads = len(rankings[0])
    for share, count in counts.items():
        shared = len(set(rankings[0][:count]) & set(rankings[1][:count]))
        chance = count / heads
        variance = count * chance * (1 - chance) * (heads - count) / max(heads - 1, 1)
        entry = {"share": share, "heads": count, "shared": shared, "overlap": shared / count}
        overlaps.append({**entry, "chance": chance, "chance_sd": math.sqrt(variance) / count})
    return {"a": a, "b": b, "spearman": spearman(one.scores, other.scores), "overlaps": overlaps}


def _ranks(scores: Tensor) -> Tensor:
    """Ranks [N] float64 from 1, equal scores with the mean of theirs."""
    _, level, size = scores.flatten().unique(return_inverse=True, return_counts=True)
    last = size.cumsum(0).double()
    return (last - (size - 1) / 2)[level]
