"""`tools/gpu.py merge`: a dated report of the results of a GPU run, and the tables generated from it.

Text between ``<!-- made by tools/gpu.py: NAME -->`` and ``<!-- end -->`` is generated here, from the newest report in
docs/gpu; tests check that it is current. Without a report it says that nothing was measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_steps import ROOT, STEPS

from surgery.common.errors import SurgeryError
from surgery.common.human import size

RUN = "run.json"
SCHEMA = 1
FOLDER = ROOT / "docs" / "gpu"
PAGES = ("README.md", "docs/kernels.md", "docs/benchmarks.md")
MARK = re.compile(r"(<!-- made by tools/gpu\.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOTHING = "Nothing was measured on a GPU yet.\n"


def merge(results: Path) -> None:
    """Write docs/gpu/DATE-DEVICE.json and update the pages.

    Raises SurgeryError: not the folder of a run, no rows, or only those of a rehearsal.
    """
    report = report_of(results)
    if report["tiny"]:
        raise SurgeryError(f"{results}: was run with --tiny; run it without --tiny for a report")
    FOLDER.mkdir(exist_ok=True)
    device = re.sub(r"[^a-z0-9]+", "-", report["device"]["name"].lower()).strip("-")
    path = FOLDER / f"{report['created'][:10]}-{device}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(path)
    write_pages(report)


def report_of(results: Path) -> dict[str, Any]:
    """Return what a run recorded: command, commit, device and versions, and the rows of each step.

    Raises SurgeryError: not the folder of a run, or no rows.
    """
    if not (results / RUN).is_file():
        raise SurgeryError(f"{results / RUN}: no such file; pass the folder that tools/gpu.py run wrote")
    report = {"schema": SCHEMA, **json.loads((results / RUN).read_text(encoding="utf-8"))}
    for step in STEPS:
        if step.name in report["steps"]:
            report["steps"][step.name]["rows"] = _rows_of(results / step.rows)
    if not any(step["rows"] for step in report["steps"].values()):
        raise SurgeryError(f"{results}: has no rows; run tools/gpu.py run again")
    first = next(iter(_rows(report, "facts")), {})
    return {**report, "device": first.get("device", {"name": "unknown"}), "versions": first.get("packages", {})}


def _rows_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a step's file; none if it does not exist."""
    if not file.exists():
        return []
    if file.suffix == ".json":
        return json.loads(file.read_text(encoding="utf-8"))["rows"]
    return [_test(case) for case in ElementTree.parse(file).iter("testcase")]


def _test(case: ElementTree.Element) -> dict[str, Any]:
    """Return the row of a test in pytest's XML."""
    kinds = {child.tag for child in case}
    outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    return {"test": f"{case.get('classname')}::{case.get('name')}", "outcome": outcome, "seconds": case.get("time")}


def newest() -> dict[str, Any] | None:
    """Read the latest report in docs/gpu."""
    reports = sorted(FOLDER.glob("*.json"))
    return json.loads(reports[-1].read_text(encoding="utf-8")) if reports else None


def write_pages(report: dict[str, Any] | None) -> None:
    """Update the generated parts of the pages."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_parts(path.read_text(encoding="utf-8"), report), encoding="utf-8")


def with_parts(page: str, report: dict[str, Any] | None) -> str:
    """Return a page with its marked parts regenerated."""
    return MARK.sub(lambda mark: mark[1] + (PARTS[mark[2]](report) if report else NOTHING) + mark[3], page)


def kernels(report: dict[str, Any]) -> str:
    """Return the table of time and share of copy bandwidth by operation."""
    rows = [row for name in ("kernels", "tuning") for row in _rows(report, name)]
    table = [
        (
            f"`{row['operation']}`",
            f"{row['model']} {row['variant']}",
            str(row["batch"]),
            f"{row['context']:,}",
            f"{row['seconds'] * 1e6:,.1f} µs",
            f"{100 * row['share_of_copy']:.0f}%",
            f"{_speedup(row):.2f}×" if _speedup(row) else "-",
            _best_library(row),
        )
        for row in rows
        if "seconds" in row
    ]
    heads = (
        "operation",
        "shape",
        "batch",
        "context",
        "time",
        "share of a copy",
        "speed over the source's",
        "fastest other",
    )
    wrong = sum(not row["gate"]["passed"] for row in rows if "gate" in row)
    return f"{_where(report)} {wrong} of {len(rows)} cases were wrong.\n\n{_table(heads, table)}\n{_tests(report)}"


def decoding(report: dict[str, Any]) -> str:
    """Return the table of tokens per second and peak memory of whole models."""
    rows = [row for name in ("decode-rows", "decode") for row in _rows(report, name) if "tokens_per_second" in row]
    table = [
        (
            row["model"],
            row["kind"],
            "ours" if row["accelerated"] else "stock",
            str(row["batch"]),
            f"{row['context']:,}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['step_seconds'] * 1e3:.2f} ms",
            f"{row['graph_step_seconds'] * 1e3:.2f} ms" if row.get("graph_step_seconds") else "-",
            size(row["peak_memory_bytes"]) if row.get("peak_memory_bytes") else "-",
        )
        for row in rows
    ]
    heads = ("model", "form", "kernels", "batch", "context", "tokens/s", "step", "step in a graph", "peak memory")
    return f"{_where(report)}\n\n{_table(heads, table)}"


def summary(report: dict[str, Any]) -> str:
    """Return sentences for the README: speed of MLA attention, and the best decode speed of a converted model."""
    where = f"{report['device']['name']}, {report['created'][:10]}"
    sentences = []
    steps = [row for row in _rows(report, "kernels") if _speedup(row)]
    if mla := next((row for row in steps if row["operation"] == "mla_decode"), None):
        sentences.append(
            f"Attention of {mla['model']} as MLA {mla['variant']} takes {mla['seconds'] * 1e6:,.0f} µs per layer at "
            f"batch {mla['batch']} and {mla['context']:,} tokens, {_speedup(mla):.2f} times as fast "
            "as the source's ([kernels](docs/kernels.md#on-a-gpu))."
        )
    rows = [row for row in _rows(report, "decode") if row.get("times_source") and row["kind"] != "source"]
    if rows:
        best = max(rows, key=lambda row: row["times_source"])
        how = "with these kernels" if best["accelerated"] else "in transformers' own code"
        sentences.append(
            f"A whole step of {best['model']} as {best['kind']} {how} at batch {best['batch']} and {best['context']:,} "
            f"tokens runs at {best['times_source']:.2f} times the source's speed "
            "([models](docs/benchmarks.md#on-a-gpu))."
        )
    if not sentences:
        return f"{_where(report)}\n"
    return "\n".join([f"On one {where}:", "", *(f"- {sentence}" for sentence in sentences), ""])


PARTS: dict[str, Callable[[dict[str, Any]], str]] = {"kernels": kernels, "decoding": decoding, "summary": summary}


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * 2 + ("---:",) * (len(heads) - 2), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _where(report: dict[str, Any]) -> str:
    versions = [f"{name} {report['versions'].get(name)}" for name in ("torch", "triton")]
    commit = f"commit {(report['commit'] or 'unknown')[:7]}"
    facts = ", ".join((report["device"]["name"], report["created"][:10], *versions, commit))
    return f"{facts}: `python {report['commands'][0]}`."


def _tests(report: dict[str, Any]) -> str:
    outcomes = [row["outcome"] for row in _rows(report, "tests")]
    return (
        f"\nTests of the kernels on the device: {outcomes.count('passed')} passed, {outcomes.count('failed')} failed.\n"
    )


def _speedup(row: dict[str, Any]) -> float | None:
    """Return the speedup over the source's attention; a report of 2026-11-27 compares with a kernel as fast as SDPA."""
    return row.get("speedup_over_source", row.get("speedup_over_gqa_decode"))


def _best_library(row: dict[str, Any]) -> str:
    timed = {name: each["seconds"] for name, each in row.get("baselines", {}).items() if "seconds" in each}
    if not timed:
        return "-"
    name = min(timed, key=timed.__getitem__)
    return f"{name}: {timed[name] * 1e6:,.1f} µs"


def _rows(report: dict[str, Any], step: str) -> list[dict[str, Any]]:
    return report["steps"].get(step, {"rows": []})["rows"]
