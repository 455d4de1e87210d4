"""``surgery plan``: choice of the conversion with the least loss within a budget.

Calibration statistics are gathered once. The candidates of every structure are sized to the budget, and to budgets
around it, at the requested context. They are simulated on held-out text, and the best one is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from surgery.calibration.held_out import HeldOut
from surgery.calibration.texts import Texts, load_texts
from surgery.checkpoint.snapshots import Snapshots
from surgery.checkpoint.unfinished import Unfinished
from surgery.common.errors import SurgeryError
from surgery.common.human import size
from surgery.common.progress import Progress
from surgery.families import any_family_of
from surgery.planning.candidates import Candidates, allowed_candidates, held_bytes, structure_of
from surgery.planning.engine_formats import Weighed, engine_formats
from surgery.planning.measure import measure
from surgery.planning.rounds import Rounds, Scores
from surgery.planning.rows import Row, alike, by_bytes, choose, rows_of
from surgery.planning.settings import PlanSettings, beyond_positions
from surgery.planning.sizes import around_best, first_round, search_by_loss
from surgery.running.source import Source
from surgery.running.unfused import open_model
from surgery.structures.base import BasisOf
from surgery.structures.context import ConversionContext
from surgery.version import __version__

DEFAULT_SHARE = 0.25
STEPS = 3
"""Steps of a plan: texts, statistics, candidates."""
REFIT_SEQUENCES = 4
"""Calibration sequences for refits of output projections, which conversions make on all: plans try many candidates.
No other number was tried."""


@dataclass(frozen=True)
class Plan:
    """Plan for a budget, as JSON values.

    Attributes:
        source: facts of the source; ``sha256`` is None without an output file.
        budget: KV bytes, share of the source's, context and batch; or the largest allowed loss increase.
        rows: measured candidates, by bytes; ``choice`` is the index of the chosen one.
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
        """Chosen candidate."""
        return self.rows[self.choice]

    @property
    def alike(self) -> int:
        """Number of rows within the budget whose cost is not significantly above the lowest; 0 for a loss budget."""
        share = self.budget["kv_ratio"]
        return 0 if share is None else len(alike(self.rows, share))

    @property
    def own_format(self) -> Row | None:
        """Best of the engine's own cache formats, which need no conversion; None if none meets the budget."""
        own = [row for row in self.rows if row.engine]
        try:
            return own[choose(own, self.budget["kv_ratio"], self.budget["max_loss"])] if own else None
        except SurgeryError:
            return None

    @property
    def next_best(self) -> Row | None:
        """Best row with another structure or other bits than the chosen one; None if none meets the budget."""
        choice, share = self.chosen, self.budget["kv_ratio"]
        others = [row for row in self.rows if (row.to, row.asked.get("bits")) != (choice.to, choice.asked.get("bits"))]
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
    out: Path | None = None,
    restart: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Find the conversion with the least loss within a byte budget, or with the fewest bytes within a loss budget.

    Args:
        called: name of the source in commands; None for its path.
        out: path of the plan file. Next to it, ``<out>.statistics.partial`` holds the statistics and the simulation's
            state, from which an interrupted plan resumes. None writes nothing.
        restart: start from scratch instead of resuming an interrupted plan.
        progress: progress bars; silent if None.

    Raises:
        SurgeryError: the source cannot be read or converted, or nothing meets the budget.
    """
    progress, began, called = progress or Progress(silent=True), time.monotonic(), called or str(source)
    reader = open_model(source, dtype=settings.weights_dtype)
    opened = Source.of(reader, settings, any_family_of(reader.config))
    share = budget_share(settings, opened)
    if beyond := beyond_positions(settings.tokens, opened.config.max_position_embeddings):
        progress.note(beyond)
    with progress.step(1, STEPS):
        texts = load_texts(opened, settings, progress, planted=False, held_out_length=settings.text_length)
    with open_work(opened, settings, texts, progress, out, restart=restart) as work:
        candidates = Candidates(opened, work, settings)
        with progress.step(3, STEPS):
            rounds = _measure_rounds(candidates, work, texts.held_out, settings, share, called)
    ordered = by_bytes(rounds.rows())
    source = max((source for _, source in rounds.scores), key=lambda source: len(source.losses))
    budget = {"kv_ratio": share, "max_loss": settings.max_loss, "context": settings.tokens, "batch": settings.batch}
    budget["kv_bytes"] = None if share is None else share * candidates.source_bytes
    return Plan(
        source={
            "path": called,
            "sha256": out and opened.reader.fingerprint(),
            "max_positions": opened.config.max_position_embeddings,
            "kv_bytes": candidates.source_bytes,
            "loss": fmean(source.losses),
            "recall": source.recall,
        },
        budget=budget,
        rows=ordered,
        choice=choose(ordered, share, settings.max_loss),
        refused=candidates.refused,
        settings=settings.to_dict(),
        text=texts.description,
        seconds=time.monotonic() - began,
    )


def _measure_rounds(
    candidates: Candidates,
    work: ConversionContext,
    held_out: HeldOut,
    settings: PlanSettings,
    share: float | None,
    called: str,
) -> Rounds:
    """Measure candidates at the share of the source's bytes and around it, or until a loss budget is met.

    Raises SurgeryError: there are no candidates.
    """
    own = engine_formats(work.opened, settings, called, candidates.refused)
    entries = [*first_round(candidates, share), *own]
    if not entries:
        raise SurgeryError(_no_candidates(candidates.refused))
    if share is not None and min(each.kv_bytes for each in entries) > share * candidates.source_bytes:
        entries += candidates.smallest()  # for the error message, which names the nearest one and its loss

    def to_rows(weighed: Sequence[Weighed], scores: Scores) -> list[Row]:
        return rows_of(weighed, scores, candidates.source_bytes, called)

    rounds = Rounds(held_out, lambda weighed, part: measure(weighed, work, part), to_rows, share, candidates.refused)
    rounds.add(entries)
    if not rounds.weighed:
        raise SurgeryError(_no_candidates(candidates.refused))
    if share is None:
        search_by_loss(rounds.weighed, rounds.scores, candidates, settings.max_loss, rounds.add)
    else:
        rounds.add(around_best(rounds, candidates, share), twice=False)
    rounds.decide(settings.max_loss)
    return rounds


@contextmanager
def open_work(
    opened: Source,
    settings: PlanSettings,
    texts: Texts,
    progress: Progress,
    out: Path | None = None,
    *,
    restart: bool = False,
) -> Iterator[ConversionContext]:
    """Yield a context with the statistics of all layers for every structure, and without held-out text.

    Structures then split budgets over layers from statistics alone.
    """
    snapshots = Snapshots()
    untried = HeldOut(texts.held_out.tokens, 0, texts.held_out.answers[:0])
    with ExitStack() as stack:
        if out is not None:
            facts = {"texts": texts.hashes(), "version": __version__, "settings": settings.to_dict()}
            folder = out.with_name(f"{out.name}.statistics")
            with progress.step(1, STEPS):
                unfinished = stack.enter_context(Unfinished(folder, opened.reader, facts, progress, restart=restart))
            snapshots = unfinished.snapshots
        texts = replace(texts, held_out=untried)
        work = ConversionContext.in_folder(snapshots, opened, settings, texts, progress)
        work = replace(work, refit_sequences=REFIT_SEQUENCES)
        for files in (work.library, work.store, work.converted):
            stack.enter_context(files)
        if any(allowed_candidates(opened.reader.config, settings)):
            basis_of, first_tokens = _statistics(opened, settings)
            with progress.step(2, STEPS):
                work.gather(basis_of=basis_of, first_tokens=first_tokens)
        yield work
        if out is not None:
            opened.reader.check_unchanged()


def budget_share(settings: PlanSettings, opened: Source) -> float | None:
    """Return the budget as a share of the source's KV bytes; None if the budget is a loss.

    Raises SurgeryError: the source's own cache fits in the memory.
    """
    if settings.max_loss is not None:
        return None
    if settings.memory is None:
        return settings.kv_ratio or DEFAULT_SHARE
    source_bytes, memory = held_bytes(opened.reader.config, opened, settings), settings.memory_bytes
    if memory >= source_bytes:
        raise SurgeryError(
            f"--memory {settings.memory}: the source's own cache takes {size(source_bytes)} at {settings.tokens:,} "
            f"tokens and batch {settings.batch}: nothing to convert; ask for a longer context or a larger batch"
        )
    return memory / source_bytes


def _statistics(opened: Source, settings: PlanSettings) -> tuple[BasisOf | None, list[int]]:
    """Return the first candidate's basis for lags, and the numbers of first tokens that statistics leave out."""
    basis_of, first_tokens = None, {0}
    for target, candidate in allowed_candidates(opened.reader.config, settings):
        try:
            structure = structure_of(target, candidate.settings, opened, settings, Progress(silent=True))
        except SurgeryError:
            continue  # the reason is recorded when the candidate is sized
        basis_of = basis_of or structure.lag_basis
        first_tokens.add(structure.first_tokens)
    return basis_of, sorted(first_tokens)


def _no_candidates(refused: dict[str, str]) -> str:
    reasons = "; ".join(f"{what}: {why}" for what, why in refused.items())
    return f"no structure can be planned for this source ({reasons or 'none is allowed'})"
