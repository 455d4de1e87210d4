"""A conversion in Weights & Biases: one run, in the group of what comes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from surgery.common.lineage import lineage
from surgery.eval.report.tracking import logged_run, place, require_wandb
from surgery.reporting.report import Report


def log_conversion(report: Report, name: str, *, project: str, mode: Literal["online", "offline"], folder: Path) -> str:
    """Writes a run of job type ``convert``: settings, losses by stage, layers, bytes, time.

    Args:
        name: of the run; the result's folder.
        folder: where wandb keeps its files; made if missing.

    Returns:
        The run's address, or its folder if offline.

    Raises:
        SurgeryError: wandb is missing or refuses, or the folder cannot be made.
    """
    told = report.to_dict()
    config = {key: told[key] for key in ("source", "target", "settings", "calibration", "environment", "command")}
    given: dict[str, Any] = {"name": name, "group": lineage(told), "job_type": "convert", "config": config}
    require_wandb()
    import wandb

    with logged_run(project, mode, folder, **given) as run:
        stages = [(row["stage"], row["loss"], row["recall"]) for row in told["ladder"]]
        tables = {"ladder": (["stage", "loss", "recall"], stages), "layers": _layers(told["layers"])}
        run.log({name: wandb.Table(columns=columns, data=rows) for name, (columns, rows) in tables.items() if rows})
        run.summary.update({name: value for name, value in _summary(told).items() if value is not None})
        return place(run, mode)


def _summary(told: dict[str, Any]) -> dict[str, Any]:
    first, last, kv = told["ladder"][0], told["ladder"][-1], told["kv"]
    measured = first["loss"] is not None and last["loss"] is not None
    return {
        "kv_bytes_per_token": kv["measured_bytes_per_token"],
        "kv_ratio": kv["measured_bytes_per_token"] / kv["source_bytes_per_token"],
        "loss": last["loss"],
        "loss/change": last["loss"] - first["loss"] if measured else None,
        "recall": last["recall"],
        "seconds": sum(told["seconds"].values()),
        "peak_memory_bytes": told["peak_memory_bytes"],
    }


def _layers(layers: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Of each layer its number, rank and measured errors."""
    stages = list(dict.fromkeys(stage for layer in layers for stage in layer.get("measured") or {}))
    rows = [
        [layer.get("layer"), layer.get("rank"), *((layer.get("measured") or {}).get(stage) for stage in stages)]
        for layer in layers
    ]
    return ["layer", "rank", *stages], rows
