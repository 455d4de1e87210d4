"""Logging of a report to Weights & Biases: one run per row, grouped with the run that healed the checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from surgery.common.errors import SurgeryError
from surgery.common.wandb_service import check_wandb, init_mode
from surgery.eval.report.figures import save_plots
from surgery.eval.report.tables import Report, ReportRow, columns, dig

NAME_LENGTH = 128
"""Maximum length of run and group names in wandb."""


def log_to_wandb(report: Report, *, project: str, mode: Literal["online", "offline"], folder: Path) -> list[str]:
    """Log each row as one wandb run of job type ``eval``; return its URL, or its folder if offline.

    The run config holds the settings, tasks, environment and the row's conversion; the summary holds the headline
    values, their changes from the baseline and all other scalar results. The first run has the plots. Converted rows
    are in the group of their conversion (`surgery.common.lineage`), which the source and its cheap baselines join if
    there is only one; otherwise their group is the report's title. The config of a row healed in a wandb run has
    ``healing_run``: ``entity/project/run_id``. "offline" writes to `folder` only. Raises SurgeryError: wandb is missing
    or reports an error, or the folder cannot be created.
    """
    check_wandb(mode)
    import wandb

    locations = []
    with tempfile.TemporaryDirectory() as pictures:
        plots = save_plots(report, Path(pictures), "png")
        for number, row in enumerate(report["rows"]):
            about = {"group": group(row, report), "job_type": "eval", "config": config(row, report)}
            with _logged_run(project, mode, folder, name=row["name"], **about) as run:
                if not number:
                    run.log({f"plots/{key}": wandb.Image(str(path)) for key, path in plots.items()})
                run.summary.update(summary(row, report))
                locations.append(str(Path(run.dir).parent) if run.offline else str(run.url))
    return locations


@contextmanager
def _logged_run(project: str, mode: str, folder: Path, *, name: str, group: str | None, **config: Any) -> Iterator[Any]:
    """Open a wandb run that is finished on exit, and marked as failed if logging raises."""
    import wandb

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with wandb.init(
            project=project,
            name=str(name)[:NAME_LENGTH],
            group=group and group[:NAME_LENGTH],
            dir=str(folder),
            mode=init_mode(mode),
            settings=wandb.Settings(silent=True, console="off"),
            **config,
        ) as run:
            yield run
    except wandb.Error as error:
        raise SurgeryError(f"wandb: {error}; `wandb login` first, or choose offline", setting="wandb") from None
    except OSError as error:
        raise SurgeryError(f"cannot write wandb's files to {folder}: {error.strerror}") from None


def group(row: ReportRow, report: Report) -> str | None:
    """Return the wandb group of a row's run: its lineage, else the report's only lineage, else the report's title."""
    lineages = {name for each in report["rows"] if (name := dig(each, "conversion", "lineage"))}
    shared = lineages.pop() if len(lineages) == 1 else report.get("title")
    name = dig(row, "conversion", "lineage") or shared
    return str(name) if name else None


def config(row: ReportRow, report: Report) -> dict[str, Any]:
    """Return the run config: the settings that determine a row's results, without the per-layer conversion data."""
    keys = ("settings", "tasks", "environment", "tokenizer", "baseline", "command", "created", "surgery_version")
    values = {key: report.get(key) for key in keys}
    values |= {key: row.get(key) for key in ("role", "path", "sha256", "class", "dtype", "variant")}
    conversion = row.get("conversion")
    if conversion:
        values["conversion"] = {key: value for key, value in conversion.items() if key != "layers"}
        run = dig(conversion, "healing", "wandb") or {}
        if run.get("run_id"):
            values["healing_run"] = "/".join(str(run[key]) for key in ("entity", "project", "run_id") if run.get(key))
    return values


def summary(row: ReportRow, report: Report) -> dict[str, float]:
    """Return headline values by column key, ``KEY/change``, ``KEY/low`` and ``KEY/high``, and all scalar results."""
    values: dict[str, float | str | None] = dict(_scalars(row.get("results") or {}))
    for column in columns(report):
        values[column.key] = column.value(row, report)
        for key, value in (column.change(row) or {}).items():
            if not (column.is_difference and key == "difference"):
                values[f"{column.key}/{'change' if key == 'difference' else key}"] = value
    return {key: value for key, value in values.items() if value is not None}


def _scalars(values: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested dicts by their path, ``loss/by_source/prose/loss``; lists are left out."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _scalars(value, f"{prefix}/{key}" if prefix else key)
    elif isinstance(values, int | float):
        yield prefix, values
