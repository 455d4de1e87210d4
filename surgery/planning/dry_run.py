"""``surgery plan --dry-run``: the candidates of a plan, from shapes, without forward passes or output."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surgery.families import any_family_of
from surgery.planning.candidates import Candidates
from surgery.planning.engine_formats import engine_formats
from surgery.planning.plan import budget_share
from surgery.planning.settings import PlanSettings
from surgery.planning.sizes import first_round
from surgery.running.source import Source
from surgery.running.unfused import open_model
from surgery.structures.dry_run import measure_speed, requested_tokens
from surgery.structures.estimates import Demand, Workload

ON_ALL = 0.5
"""Rough share of the candidates' passes over held-out text that remains after those clearly worse are dropped."""


@dataclass(frozen=True)
class PlanForecast:
    """Dry run of a plan, as JSON values.

    Attributes:
        source: its name, and its KV bytes at the plan's context and batch.
        kv_ratio: budget as a share of these bytes; None if the budget is a loss.
        candidates: those of the first round, the largest first. Later rounds try the best ones at sizes around the
            budget.
        refused: reasons of refused candidates, by name.
        memory, temporary_bytes: estimated peak memory of host and device, and disk space next to the plan file.
        work: FLOPs, measured FLOP/s, and estimated seconds.
    """

    source: dict[str, Any]
    kv_ratio: float | None
    context: int
    batch: int
    candidates: list[dict[str, Any]]
    refused: dict[str, str]
    memory: dict[str, int]
    temporary_bytes: int
    work: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def forecast_plan(source: str | Path, settings: PlanSettings, *, called: str | None = None) -> PlanForecast:
    """List the candidates of a plan and estimate its time.

    The time assumes that forward passes run at the speed of one matrix product, as in a conversion's dry run. It is
    accurate within a factor of two or three. Raises SurgeryError: the source cannot be read or converted, or its cache
    fits the memory already.
    """
    called = called or str(source)
    reader = open_model(source, dtype=settings.weights_dtype)
    opened = Source.of(reader, settings, any_family_of(reader.config))
    share = budget_share(settings, opened)
    candidates = Candidates(opened, None, settings)
    sized = first_round(candidates, share)
    own = engine_formats(opened, settings, called, candidates.refused)
    weighed = sorted([*sized, *own], key=lambda each: -each.kv_bytes)
    whole = candidates.source_bytes
    demand = Demand(round(ON_ALL * len(weighed)), calibrates=bool(sized))
    work = Workload.of(opened, settings, requested_tokens(opened, settings), demand)
    return PlanForecast(
        source={"path": called, "kv_bytes": whole},
        kv_ratio=share,
        context=settings.tokens,
        batch=settings.batch,
        candidates=[
            {"name": each.name, "kv_bytes": each.kv_bytes, "kv_ratio": each.kv_bytes / whole} for each in weighed
        ],
        refused=candidates.refused,
        memory=work.memory(),
        temporary_bytes=work.temporary_bytes,
        work=work.estimate(measure_speed(opened.stream.device, opened.stream.dtype)),
    )
