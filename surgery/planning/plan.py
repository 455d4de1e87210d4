"""``surgery plan``: from a budget to the conversion that loses least within it.

Statistics are taken once. Every structure's candidates are sized so that their bytes at the context that was asked for
keep to the budget and to the budgets around it, and are simulated on held-out text; the choice is among what was
measured. What a conversion adds, a fit, is left out: it can only lower what is predicted here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from surgery.calibration.held_out import HeldOut
from surgery.calibration.texts import Texts, load_texts
from surgery.checkpoint.snapshots import Snapshots
from surgery.checkpoint.unfinished import Unfinished
from surgery.common.errors import SurgeryError
from surgery.common.human import cost, size
from surgery.common.progress import Progress
from surgery.families import any_family_of
from surgery.forecast.attention_structures import of_config
from surgery.forecast.speed import find_gpu
from surgery.kernels.planner import compare
from surgery.planning.candidates import Candidates, Sized, held_bytes, named_candidates
from surgery.planning.cost import Cost
from surgery.planning.measure import Carried, Scored, carry, measure
from surgery.planning.mixing import Mixer
from surgery.planning.mixture import Mixture
from surgery.planning.settings import PlanSettings, beyond_positions
from surgery.running.source import Source
from surgery.running.unfused import open_model
from surgery.structures.base import BasisOf
from surgery.structures.registry import TARGETS
from surgery.structures.work import Work
from surgery.version import __version__

SHARES = (0.5, 0.25, 0.125, 0.0625)
"""Of the source's bytes, at which a picture of what can be had is taken."""
SHOWN = 3
"""Mixtures among the rows, at most: those that cost least."""
DEFAULT_SHARE = 0.25


@dataclass(frozen=True)
class Row:
    """A candidate as it was measured.

    Attributes:
        name: for people; of a mixture, how many layers become what.
        command: what asks for it; of a mixture, with the plan's file.
        kv_bytes: of all sequences at the plan's context; ``kv_ratio`` the share of the source's.
        loss_increase: nats per token over the source's; ``low`` and ``high`` what it should be within
            on other text, in 80% of the cases.
        answer_increase: nats per token of the answers in recall prompts; ``recall`` the share answered right.
        cost: what is compared, the loss with the answers' increase in it.
        speedup: of the attention of a decoding step over the source's, predicted for the GPU; None without one.
        best: whether no other candidate costs less with no more bytes.
    """

    to: str
    asked: dict[str, Any]
    name: str
    command: str
    kv_bytes: float
    kv_ratio: float
    loss_increase: float
    low: float | None
    high: float | None
    answer_increase: float | None
    recall: float | None
    cost: float
    model_type: str
    engines: dict[str, dict] = field(repr=False)
    speedup: float | None = None
    best: bool = False


STEPS = 3
"""Of every plan: texts, statistics, candidates."""


@dataclass(frozen=True)
class Plan:
    """What a budget can buy; plain values only.

    Attributes:
        budget: bytes, share of the source's, context and batch; or the most loss that is allowed.
        rows: what was measured, by bytes; ``choice`` the place of the one to take.
        refused: what the source, or the engine, does not take, and why.
    """

    source: dict[str, Any]
    budget: dict[str, Any]
    rows: list[Row]
    choice: int
    refused: dict[str, str]
    settings: dict[str, Any]
    text: dict[str, Any]
    seconds: float

    @property
    def chosen(self) -> Row:
        """What to convert to."""
        return self.rows[self.choice]

    @property
    def next_best(self) -> Row | None:
        """What would be chosen, were there nothing like the choice: no mixture, or none of its structure and bits."""
        chosen, share = self.chosen, self.budget["kv_ratio"]
        others = [row for row in self.rows if (row.to, row.asked.get("bits")) != (chosen.to, chosen.asked.get("bits"))]
        try:
            return others[choose(others, share, self.budget["max_loss"])] if others else None
        except SurgeryError:
            return None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(
    source: str | Path,
    settings: PlanSettings,
    *,
    called: str | None = None,
    allow_pickle: bool = False,
    out: Path | None = None,
    restart: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Finds the conversion of least loss within a budget, or of fewest bytes within a loss.

    Args:
        called: the source, in commands; None for its place.
        allow_pickle: read pickled weights if there are no others.
        out: the plan's file to be; beside it, in ``<out>.statistics.partial``, lies what a plan that was killed goes on
            from: statistics, and candidates on their way through the layers. None keeps nothing.
        restart: begin anew where such a plan could go on.
        progress: bars; silent if None.

    Raises:
        SurgeryError: the source cannot be read or converted, or nothing meets the budget.
    """
    progress, began, called = progress or Progress(silent=True), time.monotonic(), called or str(source)
    reader = open_model(source, allow_pickle=allow_pickle)
    opened = Source.of(reader, settings, any_family_of(reader.config))
    share, gain = _share_of(settings, opened), _forecast(settings, opened)
    # The best of many mixtures owes part of its lead to the texts that it was found on: all rows are of others then.
    twice = replace(settings, held_out=2 * settings.held_out) if settings.mixtures else settings
    if beyond := beyond_positions(settings.tokens, opened.config.max_position_embeddings):
        progress.note(beyond)
    with progress.step(1, STEPS):
        texts = load_texts(opened, twice, progress, planted=False)
    held_out, unseen = texts.held_out.halves() if settings.mixtures else (texts.held_out, None)
    with opened_work(opened, settings, texts, progress, out, restart=restart) as work:
        candidates = Candidates(opened, work, settings)
        tried = list(candidates.at(_shares_around(share)))
        if not tried:
            raise SurgeryError(_nothing(candidates.refused))
        if share is not None and min(each.kv_bytes for each in tried) > share * candidates.source_bytes:
            tried += candidates.smallest()  # the nearest that can be had, and its price
        with progress.step(3, STEPS):
            weighs = settings.mixtures > 0
            carried = measure(tried, work, held_out, weighs=weighs)
            if settings.max_loss is not None and (more := _nearer(tried, carried, candidates, settings)):
                tried += more
                carried = carried.with_more(measure(more, work, held_out, weighs=weighs))
            weighed: list[Sized | Mixture] = [*tried]
            if settings.mixtures:
                mixer = Mixer(candidates, tried, carried, work, held_out, settings)
                held = None if share is None else share * candidates.source_bytes
                if held is None:
                    mixer.for_loss(settings.max_loss)
                else:
                    mixer.within(held)
                weighed += mixer.best(SHOWN, held)
                carried = carry([each.over(opened.layers) for each in weighed], work, unseen)
    scored_source = carried.source
    rows = _rows(list(zip(weighed, carried.scored, strict=True)), scored_source, candidates.source_bytes, called, gain)
    budget = {"kv_ratio": share, "max_loss": settings.max_loss, "context": settings.tokens, "batch": settings.batch}
    budget["kv_bytes"] = None if share is None else share * candidates.source_bytes
    return Plan(
        source={
            "path": called,
            "max_positions": opened.config.max_position_embeddings,
            "kv_bytes": candidates.source_bytes,
            "loss": sum(scored_source.losses) / len(scored_source.losses),
            "recall": scored_source.recall,
        },
        budget=budget,
        rows=rows,
        choice=choose(rows, share, settings.max_loss),
        refused=candidates.refused,
        settings=settings.to_dict(),
        text=texts.description,
        seconds=time.monotonic() - began,
    )


@contextmanager
def opened_work(
    opened: Source,
    settings: PlanSettings,
    texts: Texts,
    progress: Progress,
    out: Path | None = None,
    *,
    restart: bool = False,
) -> Iterator[Work]:
    """Statistics of all layers, for every structure, and nothing to try splits of a budget on.

    Args:
        out, restart: as of :func:`make_plan`.
    """
    snapshots = Snapshots()
    untried = HeldOut(texts.held_out.tokens, 0, texts.held_out.answers[:0])
    with ExitStack() as stack:
        if out is not None:
            facts = {"source": opened.reader.stamp(), "texts": texts.hashes(), "version": __version__}
            facts["settings"] = settings.deciding()
            kept = Unfinished(out.with_name(f"{out.name}.statistics"), facts, restart=restart, note=progress.note)
            stack.enter_context(kept)
            snapshots = kept.snapshots
        texts = replace(texts, held_out=untried)
        work = Work.in_folder(snapshots, opened, settings, texts, progress)
        for files in (work.library, work.store, work.alternatives):
            stack.enter_context(files)
        with progress.step(2, STEPS):
            work.gather(basis_of=_lag_basis(opened, settings))
        yield work


def _share_of(settings: PlanSettings, opened: Source) -> float | None:
    """The share of the source's bytes that may be kept; None where the loss is what is limited.

    Raises:
        SurgeryError: the source itself fits in the memory.
    """
    if settings.max_loss is not None:
        return None
    if settings.memory is None:
        return settings.kv_ratio or DEFAULT_SHARE
    held, memory = held_bytes(opened.reader.config, opened, settings), settings.memory_bytes
    if memory >= held:
        raise SurgeryError(
            f"--memory {settings.memory}: the source's own cache takes {size(held)} at {settings.tokens:,} tokens and "
            f"batch {settings.batch}, there is nothing to convert; ask for a longer context or a larger batch"
        )
    return memory / held


def _forecast(settings: PlanSettings, opened: Source) -> Callable[[Sized | Mixture], float | None]:
    """What a candidate's speedup is predicted to be.

    Raises:
        SurgeryError: there is no such GPU.
    """
    if settings.gpu is None:
        return lambda sized: None
    gpu, number_bytes = find_gpu(settings.gpu), opened.weight_dtype.itemsize
    source = of_config(opened.reader.config, number_bytes)

    def gain(sized: Sized | Mixture) -> float:
        return compare(source, of_config(sized.config, number_bytes), settings.tokens, settings.batch, gpu).speedup

    return gain


def _shares_around(share: float | None) -> list[float]:
    """The budget and those to either side of it, or the whole picture."""
    if share is None:
        return list(SHARES)
    smaller = [other for other in SHARES if other < share * 0.75][:1]
    larger = [other for other in SHARES if other > share * 1.33][-1:]
    return [*larger, share, *smaller]


def _lag_basis(opened: Source, settings: PlanSettings) -> BasisOf | None:
    """The first that a structure asks for, by its default settings."""
    for name, target in TARGETS.working().items():
        if settings.allows(name) and named_candidates(target, opened.reader.config):
            try:
                asked = target.settings(settings.common())
                found = target.structure().for_source(opened.reader.config, asked)
                structure = found(opened, asked, Progress(silent=True))
            except SurgeryError:
                continue  # refused, with its reason, when its candidates are sized
            if structure.lag_basis is not None:
                return structure.lag_basis
    return None


def _nearer(tried: Sequence[Sized], carried: Carried, candidates: Candidates, settings: PlanSettings) -> list[Sized]:
    """Of structures whose size can be chosen, one more each, where its loss should be what is allowed."""
    curves: dict[tuple, list[tuple[float, float, Sized]]] = {}
    for sized, score in zip(tried, carried.scored, strict=True):
        if "kv_ratio" in sized.asked:
            fixed = {name: value for name, value in sized.asked.items() if name != "kv_ratio"}
            point = (sized.kv_bytes / candidates.source_bytes, score.beyond(carried.source).mean, sized)
            curves.setdefault((sized.target.name, *sorted(fixed.items(), key=str)), []).append(point)
    found = []
    for points in curves.values():
        points.sort(key=lambda point: point[0])
        for (share, loss, sized), (next_share, next_loss, _) in pairwise(points):
            if next_loss < settings.max_loss < loss and next_loss > 0:
                # Losses are near powers of the share between two that were measured.
                place = math.log(settings.max_loss / loss) / math.log(next_loss / loss)
                wanted = share * (next_share / share) ** place
                asked = {name: value for name, value in sized.asked.items() if name != "kv_ratio"}
                if more := candidates.sized(sized.target, asked, wanted):
                    found.append(more)
    return found


def _rows(
    weighed: Sequence[tuple[Sized | Mixture, Scored]],
    source: Scored,
    source_bytes: float,
    called: str,
    gain: Callable[[Sized | Mixture], float | None],
) -> list[Row]:
    rows, price = [], Cost(source)
    for sized, score in weighed:
        increase = price.increase(score)
        command = f"surgery convert {called} {sized.name}"
        if isinstance(sized, Mixture):
            command = f"surgery convert {called} --plan plan.yaml  # {sized.name}"
        rows.append(
            Row(
                to=sized.target.name,
                asked=sized.asked,
                name=sized.name.removeprefix("--to "),
                command=command,
                kv_bytes=sized.kv_bytes,
                kv_ratio=sized.kv_bytes / source_bytes,
                loss_increase=increase.mean,
                low=increase.low,
                high=increase.high,
                answer_increase=price.answers(score),
                recall=score.recall,
                cost=price(score),
                model_type=sized.config["model_type"],
                engines=sized.engines,
                speedup=gain(sized),
            )
        )
    rows.sort(key=lambda row: (row.kv_bytes, row.cost))
    least, marked = math.inf, []
    for row in rows:
        marked.append(replace(row, best=row.cost < least))
        least = min(least, row.cost)
    return marked


def choose(rows: Sequence[Row], share: float | None, max_loss: float | None) -> int:
    """The place of what costs least within the budget, or of what is smallest within the loss.

    Raises:
        SurgeryError: nothing meets it; says what comes nearest, and its price.
    """
    places = range(len(rows))
    if share is not None:
        fitting = [place for place in places if rows[place].kv_ratio <= share * (1 + 1e-9)]
        if not fitting:
            least = rows[0]
            raise SurgeryError(
                f"nothing keeps to {share:.1%} of the KV bytes; the smallest is {least.kv_ratio:.1%}, for "
                f"{cost(least.loss_increase)}: {least.command}"
            )
        return min(fitting, key=lambda place: rows[place].cost)
    fitting = [place for place in places if rows[place].loss_increase <= max_loss]
    if not fitting:
        least = min(rows, key=lambda row: row.loss_increase)
        raise SurgeryError(
            f"nothing loses at most {max_loss:g} nats per token; the least is {cost(least.loss_increase)}, at "
            f"{least.kv_ratio:.1%} of the KV bytes: {least.command}"
        )
    return min(fitting, key=lambda place: rows[place].kv_bytes)


def _nothing(refused: dict[str, str]) -> str:
    reasons = "; ".join(f"{what}: {why}" for what, why in refused.items())
    return f"no structure can be weighed for this source ({reasons or 'none is allowed'})"
