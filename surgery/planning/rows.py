"""Rows of a plan: measured candidates, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.human import cost
from surgery.eval.intervals import student_t
from surgery.planning.engine_formats import Weighed
from surgery.planning.measure import LEVEL, Scored

ANSWER_WEIGHT = 0.05
"""Weight of the loss increase on recall answers relative to that on text, whose mean loss hides failures of recall."""
CONTENDERS = 6
"""Largest number of rows in the last round."""
FAR = 4
"""Ratio of drifts above which the worse row is dropped. Measured on small models: the demo model and one without
GQA."""


@dataclass(frozen=True)
class Row:
    """Measured candidate.

    Attributes:
        to: target of the conversion, with the settings ``asked``; None for an engine's own cache format.
        command: command line that converts the source, or serves it with the engine's format.
        kv_bytes: KV bytes of all sequences at the plan's context; ``kv_ratio`` is their share of the source's.
        loss_increase: nats per token over the source's; ``low`` and ``high`` are its 80% interval on other text.
        by_text: loss increase on each text; rows of fewer rounds have the first texts only.
        divergence: divergence from the source, see :class:`surgery.planning.measure.Scored`.
        answer_increase: loss increase on answers of recall prompts; ``recall`` is the share of correct answers.
        cost: the loss increase plus `ANSWER_WEIGHT` times the increase on answers, if positive.
        best: whether the row is on the Pareto front: no other one costs less with no more bytes.
        engine: engine of the cache format; ``status``: how the simulated arithmetic was checked.
    """

    to: str | None
    asked: dict[str, Any]
    name: str
    command: str
    kv_bytes: float
    kv_ratio: float
    loss_increase: float
    low: float | None
    high: float | None
    by_text: list[float] = field(repr=False)
    divergence: float
    answer_increase: float | None
    recall: float | None
    cost: float
    model_type: str
    engines: dict[str, dict] = field(repr=False)
    best: bool = False
    engine: str | None = None
    status: str | None = None

    @property
    def drift(self) -> float:
        """Cost with the divergence in place of the loss increase."""
        return self.divergence + self.cost - self.loss_increase

    def fits_share(self, share: float) -> bool:
        """Return whether the bytes are within a share of the source's, up to rounding."""
        return self.kv_ratio <= share * (1 + 1e-9)


def rows_of(
    weighed: Sequence[Weighed], scores: Sequence[tuple[Scored, Scored]], source_bytes: float, called: str
) -> list[Row]:
    """Build the rows of candidates in order, from their scores and the source's on the same texts."""
    rows = []
    for sized, (score, source) in zip(weighed, scores, strict=True):
        increase = score.beyond(source)
        answers = None if score.answers is None else score.answers - source.answers
        rows.append(
            Row(
                to=sized.to,
                asked=sized.asked,
                name=sized.name.removeprefix("--to "),
                command=sized.command(called),
                kv_bytes=sized.kv_bytes,
                kv_ratio=sized.kv_bytes / source_bytes,
                loss_increase=increase.mean,
                low=increase.low,
                high=increase.high,
                by_text=[own - other for own, other in zip(score.losses, source.losses, strict=True)],
                divergence=score.divergence,
                answer_increase=answers,
                recall=score.recall,
                cost=increase.mean + ANSWER_WEIGHT * max(0.0, answers or 0.0),
                model_type=sized.config["model_type"],
                engines=sized.engines,
                engine=sized.engine,
                status=sized.status,
            )
        )
    return rows


def by_bytes(rows: Iterable[Row]) -> list[Row]:
    """Sort rows by bytes, and mark as `best` those that cost less than every smaller row."""
    least, marked = math.inf, []
    for row in sorted(rows, key=lambda row: (row.kv_bytes, row.cost)):
        marked.append(replace(row, best=row.cost < least))
        least = min(least, row.cost)
    return marked


def clearly_worse(rows: Sequence[Row], share: float | None = None) -> set[int]:
    """Return the indices of rows that cost more and have `FAR` times the drift of a row with no more bytes.

    Args:
        share: budget as a share of the source's bytes; rows within it count as equal in size.
    """

    def is_far(row: Row, other: Row) -> bool:
        both_fit = share is not None and row.fits_share(share) and other.fits_share(share)
        no_larger = other.kv_bytes <= row.kv_bytes or both_fit
        return no_larger and other.cost < row.cost and FAR * other.drift < row.drift

    return {index for index, row in enumerate(rows) if any(is_far(row, other) for other in rows)}


def alike(rows: Sequence[Row], share: float) -> list[int]:
    """Return the indices of rows within a share of the bytes whose cost does not differ significantly from the lowest.

    They are sorted by drift; the first one is to be chosen. Among candidates that differ by less than the noise of the
    texts, the lowest cost is chance and does not generalize to other text, while drift has far less noise. Fewer bytes
    do not count: the user has the budget that they state.
    """
    fitting = [index for index, row in enumerate(rows) if row.fits_share(share)]
    if not fitting:
        return []
    worse = clearly_worse(rows, share)  # measured on fewer texts, with less certainty
    fitting = [index for index in fitting if index not in worse]
    best = rows[min(fitting, key=lambda index: rows[index].cost)]
    level = [index for index in fitting if rows[index] is best or not _is_significantly_worse(rows[index], best)]
    return sorted(level, key=lambda index: rows[index].drift)


def _is_significantly_worse(row: Row, other: Row) -> bool:
    """Return whether a row costs significantly more than another, by a paired one-sided t-test at 90% over texts."""
    differences = [own - others for own, others in zip(row.by_text, other.by_text, strict=False)]
    if len(differences) == 1:
        return row.cost > other.cost
    answers = row.cost - row.loss_increase - (other.cost - other.loss_increase)
    spread = stdev(differences) / math.sqrt(len(differences))
    return fmean(differences) + answers > student_t(len(differences) - 1, LEVEL) * spread


def contenders(rows: Sequence[Row], share: float | None, max_loss: float | None) -> list[int]:
    """Return the indices of the rows among which more text may change the choice."""
    if share is not None:
        level = alike(rows, share)[:CONTENDERS]
        return level if len(level) > 1 else []
    sizes = [row.kv_bytes for row in rows if row.high is not None and row.high <= max_loss]
    largest = min(sizes, default=math.inf)
    doubtful = [index for index, row in enumerate(rows) if row.low is not None and row.low <= max_loss < row.high]
    smaller = [index for index in doubtful if rows[index].kv_bytes < largest]
    return sorted(smaller, key=lambda index: rows[index].kv_bytes)[:CONTENDERS]


def choose(rows: Sequence[Row], share: float | None, max_loss: float | None) -> int:
    """Return the index of the best row within a byte budget (see `alike`), or of the smallest one within a loss.

    Args:
        rows: sorted by bytes.

    Raises:
        SurgeryError: no row meets the budget; the message names the nearest one and its loss increase or bytes.
    """
    if share is not None:
        fitting = alike(rows, share)
        if not fitting:
            least = rows[0]
            raise SurgeryError(
                f"no candidate fits into {share:.1%} of the KV bytes; the smallest takes {least.kv_ratio:.1%}, for "
                f"{cost(least.loss_increase)}: {least.command}"
            )
        return fitting[0]
    meeting = [index for index, row in enumerate(rows) if row.loss_increase <= max_loss]
    if not meeting:
        least = min(rows, key=lambda row: row.loss_increase)
        raise SurgeryError(
            f"no candidate increases the loss by at most {max_loss:g} nats per token; "
            f"the smallest increase is {cost(least.loss_increase)}, at "
            f"{least.kv_ratio:.1%} of the KV bytes: {least.command}"
        )
    return min(meeting, key=lambda index: rows[index].kv_bytes)
