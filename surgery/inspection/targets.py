"""Possible conversion targets of a checkpoint, with model class, KV bytes and engines of the result."""

from __future__ import annotations

from typing import Any

from surgery.architectures.multimodal import whole_config
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.running.kv_bytes import kv_shares
from surgery.running.source import Source
from surgery.structures.base import TargetOption
from surgery.structures.kv_bytes import source_kv_bytes
from surgery.structures.registry import TARGETS, Target

COMMAND = "surgery convert "


def smallest_targets(opened: Source) -> list[dict[str, Any]]:
    """Forecast the targets' smallest recommended sizes, which :func:`forecast_targets` leaves out."""
    return [_row(opened, target, option) for target, option in _options() if not option.listed]


def forecast_targets(opened: Source) -> list[dict[str, Any]]:
    """Forecast every target, including those of installed plugins."""
    rows: list[dict[str, Any]] = []
    for target, option in _options():
        if not option.listed:
            continue
        row = _row(opened, target, option)
        if option.optional and not row["applies"]:
            continue
        if option.flags and not row["applies"] and rows and rows[-1]["reasons"] == row["reasons"]:
            continue  # refused for the same reason as the option before it
        rows.append(row)
    return rows


def option_ranks() -> dict[str, int]:
    """Return the ranks of options by loss increase (the smallest first), by their command; without unranked options."""
    return {
        _command(target, option): option.option_rank for target, option in _options() if option.option_rank is not None
    }


def _options() -> list[tuple[Target, TargetOption]]:
    return [(target, option) for target in TARGETS.working().values() for option in target.structure().options]


def _command(target: Target, option: TargetOption) -> str:
    return f"{COMMAND}--to {target.name}{option.flags}"


def _row(opened: Source, target: Target, option: TargetOption) -> dict[str, Any]:
    command = {"command": _command(target, option), "to": target.name, "caution": option.caution}
    try:
        settings = target.settings(option.settings)
        structure = target.structure().for_source(opened.reader.config, settings)
        forecast = structure.over(opened, settings, Progress(silent=True)).forecast()
        config = forecast.config
        result_bytes, of_source = forecast.kv_bytes_per_token, source_kv_bytes(opened)
        shares = kv_shares(
            config,
            opened.weight_dtype,
            opened.reader.config,
            opened.weight_dtype,
            opened.config.max_position_embeddings,
        )
    except SurgeryError as error:
        return {**command, "applies": False, "class": None, "reasons": [str(error)], "engines": {}}
    return {
        **command,
        "applies": True,
        "class": whole_config(opened.reader, config)["model_type"],
        "reasons": forecast.reasons,
        "engines": forecast.engines_of(opened.reader, config),
        "kv_bytes_per_token": result_bytes,
        "kv_ratio": result_bytes / of_source,
        "kv_ratio_at": shares,
    }
