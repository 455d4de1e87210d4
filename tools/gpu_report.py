"""`tools/gpu.py merge`: a dated report of the results of a GPU run, and the tables generated from it.

Text between ``<!-- made by tools/gpu.py: NAME -->`` and ``<!-- end -->`` is generated here, from the newest report in
docs/gpu; tests check that it is current. Without a report it says that nothing was measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gpu_run import RESULTS
from gpu_steps import ROOT

from surgery.common.errors import SurgeryError
from surgery.common.human import duration, size

SCHEMA = 1
FOLDER = ROOT / "docs" / "gpu"
PAGES = ("README.md", "docs/kernels.md", "docs/benchmarks.md")
MARK = re.compile(r"(<!-- made by tools/gpu\.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOTHING = "Nothing was measured on a GPU yet.\n"


def merge(results: list[Path]) -> None:
    """Write docs/gpu/DATE-DEVICE.json and update the pages.

    Raises SurgeryError: no rows, or only those of a rehearsal.
    """
    report = report_of(_lines(results))
    if report["tiny"]:
        raise SurgeryError(f"{results[0]}: was run with --tiny; run it without --tiny for a report")
    FOLDER.mkdir(exist_ok=True)
    device = re.sub(r"[^a-z0-9]+", "-", report["device"]["name"].lower()).strip("-")
    path = FOLDER / f"{report['created'][:10]}-{device}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(path)
    write_pages(report)


def report_of(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Collect the rows of runs on one machine by step, with device, versions, commit and commands.

    Raises SurgeryError: no rows.
    """
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "created": "",
        "commit": None,
        "tiny": False,
        "commands": [],
        "steps": {},
    }
    for line in lines:
        if line.get("event") == "run":
            report |= {"created": line["at"], "commit": line["commit"], "tiny": report["tiny"] or line["tiny"]}
            report["commands"].append(line["command"])
        elif "step" in line:
            step = report["steps"].setdefault(line["step"], {"rows": []})
            if "row" in line:
                step["rows"].append(line["row"])
            else:
                step |= {name: line[name] for name in ("code", "seconds", "cut", "programs", "why") if name in line}
    rows = [row for step in report["steps"].values() for row in step["rows"]]
    if not rows:
        raise SurgeryError(f"{RESULTS}: has no rows; pass the folder that tools/gpu.py run wrote")
    first = next((row for row in report["steps"].get("facts", {"rows": []})["rows"]), {})
    return {**report, "device": first.get("device", {"name": "unknown"}), "versions": first.get("packages", {})}


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
    rows = [
        row
        for name in ("decode-rows", "decode", "decode-model")
        for row in _rows(report, name)
        if "tokens_per_second" in row
    ]
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
    return f"{_where(report)}\n\n{_table(heads, table)}{_conversions(report)}{_healing(report)}"


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


def _conversions(report: dict[str, Any]) -> str:
    lines = [
        f"Conversion of {row['layers']} layers of a {row['shape']} shape to MLA, {row['calibration_tokens']:,} "
        f"calibration tokens: {duration(row['seconds'])}; projected for all layers: "
        f"{duration(row['projected_seconds_of_all_layers'])}."
        for row in _rows(report, "convert-shape")
    ]
    return "".join(f"\n{line}\n" for line in lines)


def _healing(report: dict[str, Any]) -> str:
    held_out = [row for row in _rows(report, "heal") if row.get("event") == "held_out"]
    steps = [row for row in _rows(report, "heal") if row.get("event") == "step"]
    if len(held_out) < 2 or not steps:
        return ""
    first, last = held_out[0], held_out[-1]
    return (
        f"\nHealing of the small real model as MLA at a quarter, {last['tokens']:,} tokens at "
        f"{steps[-1]['tokens_per_second']:,.0f} tokens/s: cross-entropy {first['cross_entropy']:.4f} → "
        f"{last['cross_entropy']:.4f} (source {last['teacher_cross_entropy']:.4f}).\n"
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


def _lines(results: Iterable[Path]) -> list[dict[str, Any]]:
    lines = []
    for result in results:
        path = result / RESULTS if result.is_dir() else result
        if not path.is_file():
            raise SurgeryError(f"{path}: no such file; pass the folder that tools/gpu.py run wrote")
        # The last line may have been cut short.
        text = path.read_text(encoding="utf-8")
        lines += [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return lines
