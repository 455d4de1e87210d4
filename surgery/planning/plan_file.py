"""Plan files, which ``surgery plan`` writes and ``surgery convert --plan`` reads. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from surgery.checkpoint.disk import write_whole
from surgery.common.errors import SurgeryError
from surgery.common.file_settings import read_mapping
from surgery.structures.registry import Target, find_target

if TYPE_CHECKING:
    from surgery.planning.plan import Plan

OF_TEXT = (
    "calibration",
    "calibration_tokens",
    "calibration_length",
    "text_field",
    "recall",
    "seed",
    "weights_dtype",
)
"""Settings of the calibration text, which the conversion takes from the plan."""


@dataclass(frozen=True)
class PlannedConversion:
    """Conversion described by a plan file.

    Attributes:
        predicted: the plan's predictions (loss increase, recall, KV bytes), for the report.
    """

    target: Target
    settings: Mapping[str, Any]
    predicted: Mapping[str, Any]


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan's choice as YAML atomically. Raises SurgeryError if the file cannot be written."""
    row, budget = plan.chosen, plan.budget
    predicted = {
        "loss_increase": row.loss_increase,
        "low": row.low,
        "high": row.high,
        "recall": row.recall,
        "kv_bytes": row.kv_bytes,
        "kv_ratio": row.kv_ratio,
        "context": budget["context"],
        "batch": budget["batch"],
    }
    of_text = {name: plan.settings[name] for name in OF_TEXT}
    if row.to is None:
        entries, head = {"serve": row.command, "predicted": predicted}, "# No conversion is needed.\n"
    else:
        entries = {"to": row.to, "settings": {**of_text, **row.asked}, "predicted": predicted}
        head = f"# {shlex.join(['surgery', 'convert', plan.source['path'], '--plan', str(path)])}\n"
    write_whole(path, head + yaml.safe_dump(entries, sort_keys=False))


def read_plan(path: Path) -> PlannedConversion:
    """Read a plan file. Raises SurgeryError: the file is not a plan, or its choice needs no conversion."""
    entries = read_mapping(path)
    if "serve" in entries:
        raise SurgeryError.at(
            path,
            f"no conversion is needed, the engine's own cache meets the budget: {entries['serve']}; to convert anyway, "
            "plan with --allow and the structures to choose from",
            setting="plan",
        )
    if set(entries) != {"to", "settings", "predicted"} or not all(
        isinstance(entries[name], Mapping) for name in ("settings", "predicted")
    ):
        raise SurgeryError.at(
            path, "not a plan file: it needs to, settings and predicted; create one with surgery plan"
        )
    for name in ("loss_increase", *entries["predicted"]):
        value = entries["predicted"].get(name)
        if type(value) not in (int, float) and not (value is None and name != "loss_increase"):
            raise SurgeryError.at(
                path, f"predicted {name} must be a number, not {value!r}; create the plan again with surgery plan"
            )
    return PlannedConversion(find_target(str(entries["to"])), entries["settings"], entries["predicted"])
