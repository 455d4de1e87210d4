"""Measured candidates, a row each, and the choice among the rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.human import cost
from surgery.planning.measure import Scored, student_t
from surgery.planning.weighed import Weighed

ANSWER_WEIGHT = 0.05
"""What a nat on the answer of a recall prompt counts as, in nats on a token of text: the mean loss of text hides it."""
CONTENDERS = 6
"""Rows that are worth more text, at most."""
FAR = 4
"""Times the drift of another row from which on one is not looked at further. Of small models: the demo model and one
with a KV head for every query head (docs/research/planning.md)."""


@dataclass(frozen=True)
class Row:
    """A candidate as it was measured.

    Attributes:
        to: target of the conversion, with the settings ``asked``; None of a format that an engine has by itself.
        name: for people.
        command: the command line that converts so, or serves the source so.
        kv_bytes: of all sequences at the plan's context; ``kv_ratio`` the share of the source's.
        loss_increase: nats per token over the source's; ``low`` and ``high`` what it should be within
            on other text, in 80% of the cases.
        by_text: the increase on each text; a row that was measured on fewer has seen the first ones.
        divergence: from the source's predictions, see :class:`surgery.planning.measure.Scored`.
        answer_increase: nats per token of the answers in recall prompts; ``recall`` the share answered right.
        cost: what is compared, the loss with the answers' increase in it.
        best: whether no other candidate costs less with no more bytes.
        engine: whose own format it is, which needs no conversion; ``status``: how its arithmetic was checked.
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
        """The cost with the divergence in the place of the loss."""
        return self.divergence + self.cost - self.loss_increase

    def keeps_to(self, share: float) -> bool:
        """Return whether the bytes are at most that share of the source's, but for rounding."""
        return self.kv_ratio <= share * (1 + 1e-9)


def rows_of(
    weighed: Sequence[Weighed],
    scores: Sequence[tuple[Scored, Scored]],
    source_bytes: float,
    called: str,
) -> list[Row]:
    """Build the rows in the order of their candidates.

    Args:
        scores: of each, and of the source on the same texts.
        called: the source, in commands.
    """
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
    """The rows in their order, those marked that cost less than everything smaller."""
    least, marked = math.inf, []
    for row in sorted(rows, key=lambda row: (row.kv_bytes, row.cost)):
        marked.append(replace(row, best=row.cost < least))
        least = min(least, row.cost)
    return marked


def far_behind(rows: Sequence[Row], share: float | None = None) -> set[int]:
    """Places of the rows that cost more, and have moved predictions `FAR` times as much, as one that is no larger.

    Args:
        share: of the source's bytes, that may be kept: of rows within it none is larger than another.
    """

    def is_far(row: Row, other: Row) -> bool:
        both_fit = share is not None and row.keeps_to(share) and other.keeps_to(share)
        no_larger = other.kv_bytes <= row.kv_bytes or both_fit
        return no_larger and other.cost < row.cost and FAR * other.drift < row.drift

    return {place for place, row in enumerate(rows) if any(is_far(row, other) for other in rows)}


def alike(rows: Sequence[Row], share: float) -> list[int]:
    """Places of the rows within a share of the bytes that their texts cannot tell from the one that costs least.

    The one of least drift, which is to be chosen, comes first. Of many candidates that differ by less than the noise of
    the texts the least cost is luck, which other text does not repeat; how far predictions moved is measured with far
    less noise, and is what any text pays for. Not the fewest bytes: who names a budget has it, and who wants less
    names less.
    """
    fitting = [place for place, row in enumerate(rows) if row.keeps_to(share)]
    if not fitting:
        return []
    behind = far_behind(rows, share)  # of fewer texts, which tell less
    fitting = [place for place in fitting if place not in behind]
    best = rows[min(fitting, key=lambda place: rows[place].cost)]
    level = [place for place in fitting if rows[place] is best or not _costs_more(rows[place], best)]
    return sorted(level, key=lambda place: rows[place].drift)


def _costs_more(row: Row, other: Row) -> bool:
    """Return whether the difference by text is significant, by Student's t of one side at 90%."""
    differences = [own - others for own, others in zip(row.by_text, other.by_text, strict=False)]
    if len(differences) == 1:
        return row.cost > other.cost
    answers = row.cost - row.loss_increase - (other.cost - other.loss_increase)
    spread = stdev(differences) / math.sqrt(len(differences))
    return fmean(differences) + answers > student_t(len(differences) - 1) * spread


def contenders(rows: Sequence[Row], share: float | None, max_loss: float | None) -> list[int]:
    """Places of the rows between which more text would decide."""
    if share is not None:
        level = alike(rows, share)[:CONTENDERS]
        return level if len(level) > 1 else []
    sizes = [row.kv_bytes for row in rows if row.high is not None and row.high <= max_loss]
    largest = min(sizes, default=math.inf)
    doubtful = [place for place, row in enumerate(rows) if row.low is not None and row.low <= max_loss < row.high]
    smaller = [place for place in doubtful if rows[place].kv_bytes < largest]
    return sorted(smaller, key=lambda place: rows[place].kv_bytes)[:CONTENDERS]


def choose(rows: Sequence[Row], share: float | None, max_loss: float | None) -> int:
    """The place of what costs least within the budget, as far as texts tell, or of what is smallest within the loss.

    Args:
        rows: by bytes.

    Raises:
        SurgeryError: nothing meets it; says what comes nearest, and its price.
    """
    if share is not None:
        fitting = alike(rows, share)
        if not fitting:
            least = rows[0]
            raise SurgeryError(
                f"nothing keeps to {share:.1%} of the KV bytes; the smallest is {least.kv_ratio:.1%}, for "
                f"{cost(least.loss_increase)}: {least.command}"
            )
        return fitting[0]
    meeting = [place for place, row in enumerate(rows) if row.loss_increase <= max_loss]
    if not meeting:
        least = min(rows, key=lambda row: row.loss_increase)
        raise SurgeryError(
            f"nothing loses at most {max_loss:g} nats per token; the least is {cost(least.loss_increase)}, at "
            f"{least.kv_ratio:.1%} of the KV bytes: {least.command}"
        )
    return min(meeting, key=lambda place: rows[place].kv_bytes)
