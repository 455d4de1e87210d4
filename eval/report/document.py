"""Reports as plain dictionaries: reading, comparison with the baseline, and merging."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.eval.intervals import paired_difference

SCHEMA = 1
# Settings that determine results, in addition to those of each task; reports in which they differ cannot be merged.
SHARED_SETTINGS = ("seed", "limit", "batch_size", "dtype", "device", "context")

Report = dict[str, Any]
ReportRow = dict[str, Any]

# Functions from a row's results to per-sample values, by the key of the comparison.
SAMPLES: dict[str, Callable[[dict], Sequence[float]]] = {
    "loss": lambda results: results["loss"]["per_sequence"],
    "decoded_loss": lambda results: results["loss"]["cached"]["decoded_per_sequence"],
    "loss_of_others": lambda results: results["loss"]["memorised"]["per_sequence"],
    "recall": lambda results: results["recall"]["hits"],
    "needle": lambda results: results["needle"]["hits"],
}


def compare_with_baseline(row: ReportRow, baseline: ReportRow) -> dict[str, Any]:
    """Compute paired differences of a row from the baseline for every task with samples of both."""
    differences = {}
    for name, samples in SAMPLES.items():
        try:
            pair = samples(row["results"]), samples(baseline["results"])
        except (KeyError, TypeError):  # not measured in both rows
            continue
        differences[name] = asdict(paired_difference(*pair))
    for name, result in row["results"].items():
        other = baseline["results"].get(name)
        if isinstance(result, dict) and "headline" in result and "samples" in result and other:
            differences[name] = asdict(paired_difference(result["samples"], other["samples"]))
    return differences


def baseline_of(report: Report) -> ReportRow | None:
    """Return the row that the other rows are compared with; None without a baseline."""
    return next((row for row in report["rows"] if row["name"] == report.get("baseline")), None)


def finish(report: Report) -> Report:
    """Add the KV shares of each row and its comparison with the baseline, in place."""
    baseline = baseline_of(report)
    for row in report["rows"]:
        row["kv"]["ratio"] = row["kv"]["held_bytes"] / baseline["kv"]["held_bytes"] if baseline else None
        peaks = row["kv"].get("peak_bytes"), baseline["kv"].get("peak_bytes") if baseline else None
        row["kv"]["peak_ratio"] = peaks[0] / peaks[1] if all(peaks) else None
        compares = baseline is not None and row is not baseline
        row["comparison"] = compare_with_baseline(row, baseline) if compares else None
    return report


def compared_context(report: Report) -> int | None:
    """Return the context of KV bytes that rows are compared at, where it is longer than that of the live bytes.

    It is the longest one with predicted bytes that fits in the windows of the loss: caches with a residual window have
    a smaller share in long windows. None: rows are compared by their live bytes.
    """
    live, length = dig(report, "tasks", "kv", "context"), dig(report, "tasks", "loss", "length")
    contexts = [int(tokens) for tokens in dig(baseline_of(report) or {}, "kv", "by_context") or {}]
    if live is None or length is None:
        return None
    return max((tokens for tokens in contexts if live < tokens <= length), default=None)


def compared_share(row: ReportRow, report: Report) -> float | None:
    """Return a row's KV bytes relative to the baseline's at `compared_context`; the live ones without a prediction."""
    context = compared_context(report)
    predicted = None if context is None else share_at(row, report, context)
    return dig(row, "kv", "ratio") if predicted is None else predicted


def share_at(row: ReportRow, report: Report, context: int) -> float | None:
    """Return a row's predicted KV bytes at a context length relative to the baseline's; None without a prediction."""
    pair = [dig(each, "kv", "by_context", str(context)) for each in (row, baseline_of(report))]
    return pair[0] / pair[1] if all(pair) else None


def dig(value: Any, *path: str) -> Any:
    """Return the value at a path of keys in nested dicts; None if any step is missing."""
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def read_report(path: str | Path) -> Report:
    """Read a report from its JSON file or from a folder with a report.json.

    Raises SurgeryError: the file cannot be read, or is not a report of this schema.
    """
    path = Path(path)
    path = path / "report.json" if path.is_dir() else path
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SurgeryError.at(path, f"{error.strerror or error}; give the report.json of surgery eval") from None
    except (ValueError, RecursionError) as error:
        raise SurgeryError.at(path, f"not JSON ({error})") from None
    if not isinstance(report, dict) or not {"schema", "rows", "tasks", "settings", "baseline"} <= report.keys():
        raise SurgeryError.at(path, "not a report of surgery eval")
    if report["schema"] != SCHEMA:
        raise SurgeryError.at(path, f"report of schema {report['schema']}, this version reads {SCHEMA}; evaluate again")
    return report


@contextlib.contextmanager
def undamaged(names: Sequence[str]) -> Iterator[None]:
    """Convert errors of the block, which merges and renders reports, to one message that a report is damaged.

    Raises SurgeryError: a part of a report is missing or has the wrong type.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise SurgeryError(f"{', '.join(names)}: no whole report of surgery eval ({reason}); evaluate again") from error


def merge(reports: Sequence[Report], names: Sequence[str]) -> Report:
    """Merge reports, named so in errors, that were made on the same data with the same settings.

    The baselines of all reports must be the same model. Rows with the same name must be the same model; results that
    only a later report has are added. Raises SurgeryError: data, settings or baselines differ, or two models have the
    same name.
    """
    if not reports:
        raise SurgeryError("no report to compare: give the report.json of two or more evaluations")
    first = reports[0]
    merged = {**first, "tasks": dict(first["tasks"]), "rows": []}
    for report, name in zip(reports, names, strict=True):
        _check_same(first, report, names[0], name)
        for task, settings in report["tasks"].items():
            recorded = merged["tasks"].setdefault(task, settings)
            if recorded != settings:
                differing = ", ".join(k for k in {**recorded, **settings} if recorded.get(k) != settings.get(k))
                raise SurgeryError(f"{name}: task {task} was measured with other settings or data ({differing})")
        merged["baseline"] = merged["baseline"] or report["baseline"]
        for row in report["rows"]:
            _add_row(merged["rows"], row, name)
    _check_baselines(reports, names, merged)
    merged["merged_from"] = [
        {"report": name, **{key: report[key] for key in ("created", "command", "environment")}}
        for report, name in zip(reports, names, strict=True)
    ]
    return finish(merged)


def _check_same(first: Report, other: Report, first_name: str, name: str) -> None:
    for setting in SHARED_SETTINGS:
        expected, value = first["settings"].get(setting), other["settings"].get(setting)
        if expected != value:
            raise SurgeryError(
                f"{name}: {setting} is {value}, in {first_name} it is {expected}; they are not comparable"
            )
    if first["tokenizer"] != other["tokenizer"]:
        raise SurgeryError(
            f"{name}: its models have another tokenizer than those of {first_name}; they are not comparable"
        )


def _add_row(rows: list[ReportRow], row: ReportRow, report: str) -> None:
    existing = next((other for other in rows if other["name"] == row["name"]), None)
    if existing is None:
        rows.append({**row, "results": dict(row["results"]), "seconds": dict(row["seconds"]), "kv": dict(row["kv"])})
        return
    if (existing["sha256"], existing["variant"]) != (row["sha256"], row["variant"]):
        raise SurgeryError(
            f"{report}: {row['name']} is another model than in an earlier report; rename it: surgery eval NAME=CKPT"
        )
    for task, result in row["results"].items():
        if task not in existing["results"]:
            existing["results"][task] = result
            existing["seconds"][task] = row["seconds"].get(task)


def _check_baselines(reports: Sequence[Report], names: Sequence[str], merged: Report) -> None:
    """Check that all reports have the same baseline, to which their KL divergences refer."""
    rows = {row["name"]: row for row in merged["rows"]}
    expected = rows.get(merged["baseline"])
    for report, name in zip(reports, names, strict=True):
        if report["baseline"] and rows[report["baseline"]]["sha256"] != expected["sha256"]:
            raise SurgeryError(
                f"{name}: its baseline {report['baseline']} is another model than {merged['baseline']}; "
                "they do not compare"
            )
