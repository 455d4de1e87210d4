"""Sizes at which candidates are measured: the budget, those around it, and those at which a loss would be met."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from surgery.planning.candidates import Candidates, Sized
from surgery.planning.rounds import Rounds, Scores
from surgery.planning.rows import far_behind
from surgery.planning.weighed import Weighed

SHARES = (0.5, 0.25, 0.125, 0.0625)
"""Of the source's bytes, at which a picture of what can be had is taken."""
AIM = 0.9
"""Of the loss that is allowed, where it is looked for: half of those that should lose all of it would lose more."""


def shares_around(share: float | None) -> list[float]:
    """The budget and those to either side of it, or the whole picture."""
    if share is None:
        return list(SHARES)
    smaller = [other for other in SHARES if other < share * 0.75][:1]
    larger = [other for other in SHARES if other > share * 1.33][-1:]
    return [*larger, share, *smaller]


def first_round(candidates: Candidates, share: float | None) -> list[Sized]:
    """Return the candidates at the budget, or the whole picture; at the shares around it where none has that size."""
    shares = list(SHARES) if share is None else [share]
    return list(candidates.at(shares)) or list(candidates.at(shares_around(share)))


def around_best(rounds: Rounds, candidates: Candidates, share: float) -> list[Sized]:
    """Return the candidates that are not far behind at a share of the source's bytes, at the shares around it."""
    behind, configs, candidates_found = far_behind(rounds.rows(), share), [each.config for each in rounds.weighed], []
    near = [each for place, each in enumerate(rounds.weighed) if "kv_ratio" in each.asked and place not in behind]
    for each in near:
        for other in shares_around(share):
            sized = _resized(each, other, candidates)
            if sized and sized.config not in configs:
                configs.append(sized.config)
                candidates_found.append(sized)
    return candidates_found


def look_for_loss(
    weighed: list[Weighed],
    scores: Scores,
    candidates: Candidates,
    max_loss: float,
    add: Callable[[Sequence[Weighed]], None],
) -> None:
    """Adds of structures whose size can be chosen halves of the smallest, as long as these lose less than is allowed,
    and then one each where its loss should be just less.

    Args:
        weighed, scores: what was measured; ``add`` measures more and puts it there.
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
                # Losses are near powers of the share between two that were measured.
                place = math.log(AIM * max_loss / loss) / math.log(next_loss / loss)
                target_share = share * (next_share / share) ** place
                resized.append(_resized(sized, target_share, candidates))
    if more := list(filter(None, resized)):
        add(more)


def _curves(
    weighed: Sequence[Weighed], scores: Scores, candidates: Candidates
) -> list[list[tuple[float, float, Sized]]]:
    """Shares of the source's bytes, increases of the loss and candidates of one way of asking each, by share."""
    curves: dict[tuple, list[tuple[float, float, Sized]]] = {}
    for sized, (score, source) in zip(weighed, scores, strict=True):
        if "kv_ratio" in sized.asked:
            point = (sized.kv_bytes / candidates.source_bytes, score.beyond(source).mean, sized)
            curves.setdefault((sized.target.name, *sorted(_but_size(sized).items(), key=str)), []).append(point)
    return [sorted(points, key=lambda point: point[0]) for points in curves.values()]


def _but_size(sized: Sized) -> dict[str, Any]:
    """Return the settings without the ratio."""
    return {name: value for name, value in sized.asked.items() if name != "kv_ratio"}


def _resized(sized: Sized, share: float, candidates: Candidates) -> Sized | None:
    """Return the same structure at another share of the source's bytes, or None if it cannot have it."""
    return candidates.sized(sized.target, _but_size(sized), share, record=False)
