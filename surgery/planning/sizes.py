"""Sizes at which candidates are measured: the budget, sizes around it, and sizes that should meet a loss budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from surgery.planning.candidates import Candidates, Sized
from surgery.planning.engine_formats import Weighed
from surgery.planning.rounds import Rounds, Scores
from surgery.planning.rows import clearly_worse

SHARES = (0.5, 0.25, 0.125, 0.0625)
"""Default shares of the source's bytes, for an overview."""
AIM = 0.9
"""Share of the loss budget to aim for; half of the candidates sized for the whole budget would exceed it."""


def neighboring_shares(share: float | None) -> list[float]:
    """Return a share with its neighbors in `SHARES`; None for all of them."""
    if share is None:
        return list(SHARES)
    smaller = [other for other in SHARES if other < share * 0.75][:1]
    larger = [other for other in SHARES if other > share * 1.33][-1:]
    return [*larger, share, *smaller]


def first_round(candidates: Candidates, share: float | None) -> list[Sized]:
    """Return the candidates at the budget, or at all `SHARES`; if none has that size, at the neighboring shares."""
    shares = list(SHARES) if share is None else [share]
    return list(candidates.at(shares)) or list(candidates.at(neighboring_shares(share)))


def around_best(rounds: Rounds, candidates: Candidates, share: float) -> list[Sized]:
    """Return the candidates that are not clearly worse, resized to the shares around the budget."""
    worse, configs, resized = clearly_worse(rounds.rows(), share), [each.config for each in rounds.weighed], []
    near = [each for index, each in enumerate(rounds.weighed) if "kv_ratio" in each.asked and index not in worse]
    for each in near:
        for other in neighboring_shares(share):
            sized = _resized(each, other, candidates)
            if sized and sized.config not in configs:
                configs.append(sized.config)
                resized.append(sized)
    return resized


def search_by_loss(
    weighed: list[Weighed],
    scores: Scores,
    candidates: Candidates,
    max_loss: float,
    add: Callable[[Sequence[Weighed]], None],
) -> None:
    """Search the size of each scalable structure that meets the loss budget; ``add`` measures and appends candidates.

    Halves the smallest size while its loss is below the budget, then adds an interpolated one just below the budget.
    """

    while more := [
        smaller
        for (share, loss, sized), *_ in _curves(weighed, scores, candidates)
        if loss < max_loss and (smaller := _resized(sized, share / 2, candidates))
    ]:
        add(more)
    resized = []
    for points in _curves(weighed, scores, candidates):
        for (share, loss, sized), (next_share, next_loss, _) in pairwise(points):
            if 0 < next_loss < AIM * max_loss and loss > max_loss:
                # Between two measured points the loss is close to a power of the share.
                exponent = math.log(AIM * max_loss / loss) / math.log(next_loss / loss)
                target_share = share * (next_share / share) ** exponent
                resized.append(_resized(sized, target_share, candidates))
    if more := list(filter(None, resized)):
        add(more)


def _curves(
    weighed: Sequence[Weighed], scores: Scores, candidates: Candidates
) -> list[list[tuple[float, float, Sized]]]:
    """Group candidates that differ in size only: curves of (share of bytes, loss increase, candidate), by share."""
    curves: dict[tuple, list[tuple[float, float, Sized]]] = {}
    for sized, (score, source) in zip(weighed, scores, strict=True):
        if "kv_ratio" in sized.asked:
            point = (sized.kv_bytes / candidates.source_bytes, score.beyond(source).mean, sized)
            curves.setdefault((sized.target.name, *sorted(_without_ratio(sized).items(), key=str)), []).append(point)
    return [sorted(points, key=lambda point: point[0]) for points in curves.values()]


def _without_ratio(sized: Sized) -> dict[str, Any]:
    return {name: value for name, value in sized.asked.items() if name != "kv_ratio"}


def _resized(sized: Sized, share: float, candidates: Candidates) -> Sized | None:
    """Resize a candidate to another share of the source's bytes; None if it is refused, or has failed."""
    resized = candidates.sized(sized.target, _without_ratio(sized), share, record=False)
    return None if resized is None or resized.name in candidates.refused else resized
