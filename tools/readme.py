"""Generate the README's table and picture of SmolLM2, and the texts and plots of all reports.

Sources are the reports in docs/smollm2/rows and docs/smollm2/rows-8k, which `surgery run recipes/smollm2-rows.yaml`
writes, and the records of `surgery bench decode` in docs/smollm2/decoding (docs/kernels.md has the command).

    python tools/readme.py            # writes them; tests check that they are current
"""

from __future__ import annotations

import json
import math
import re
import statistics
import textwrap
from pathlib import Path
from typing import Any

from surgery.common.human import duration
from surgery.eval.report import markdown
from surgery.eval.report.document import read_report
from surgery.eval.report.figures import save_plots
from surgery.eval.report.tables import columns

ROOT = Path(__file__).resolve().parent.parent
REPORT, README = ROOT / "docs" / "smollm2" / "rows", ROOT / "README.md"
RECALL_REPORT = REPORT.with_name("rows-recall")
"""Recall of 100 prompts."""
LONG_REPORT = REPORT.with_name("rows-8k")
"""Report of the same rows in windows of 8,192 tokens."""
DECODING = REPORT.with_name("decoding")
"""Records of several runs of one benchmark."""
CONTEXT = 8000
SHOWN = {
    "kv_bytes_per_token": "KV B/token",
    "kv_ratio": "KV share",
    "kv_ratio_8k": "KV share, 8k",
    "loss_change": "Δ loss",
    "perplexity": "perplexity",
    "recall": "recall",
}
ANSWERS = {
    "mla-4": "surgery convert --to mla",
    "cascade-8": "--to crosslayer",
    "cascade-16": "--kv-ratio 0.0625",
}
"""Rows described beneath the picture, and the commands that make them."""
BEGIN, END = "<!-- made by tools/readme.py -->\n", "<!-- end -->"


def hook(report: dict[str, Any], recall_report: dict[str, Any]) -> str:
    """Return the sentences beneath the picture."""
    columns_by_key = {column.key: column for column in columns(report)}
    rows = {row["name"]: row for row in report["rows"]}
    recall_rows = {
        row["name"]: row for row in recall_report["rows"] if row["sha256"] == rows.get(row["name"], {}).get("sha256")
    }

    def text_of(key: str, name: str) -> str:
        return columns_by_key[key].text(rows[name], report)

    def found(name: str) -> int:
        return sum(recall_rows[name]["results"]["recall"]["hits"])

    sentences, prompts = [], recall_report["settings"]["recall_prompts"]
    for name, command in ANSWERS.items():
        healing = rows[name]["conversion"]["healing"]
        trained = f", trained on {healing['tokens']:,} tokens in {duration(healing['seconds'])}" if healing else ""
        keys = f", {found('source')} → {found(name)} of {prompts} keys found" if name in recall_rows else ""
        sentences.append(
            f"`{name}` (`{command}`{trained}) keeps {text_of('kv_ratio', name)} of the KV bytes: perplexity "
            f"{text_of('perplexity', 'source')} → {text_of('perplexity', name)}{keys}."
        )
    sentences.append("Nothing was trained." if "trained" not in " ".join(sentences) else "Nothing else was trained.")
    return textwrap.fill(" ".join(sentences), 130, break_long_words=False, break_on_hyphens=False) + "\n"


def median_steps() -> dict[tuple[str, bool, int], float]:
    """Return the median seconds of a decoding step by model (source or a conversion), kernels and context."""
    seconds: dict[tuple[str, bool, int], list[float]] = {}
    for path in sorted(DECODING.glob("*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if "step_seconds" in row:
                name = "source" if row["kind"] == "source" else row["model"]
                seconds.setdefault((name, row["accelerated"], row["context"]), []).append(row["step_seconds"])
    return {key: statistics.median(each) for key, each in seconds.items()}


def caption(report: dict[str, Any], long_report: dict[str, Any]) -> str:
    """Return the description of the measurement."""
    settings, long = report["settings"], long_report["settings"]
    text = (
        f"Loss (nats per token) and perplexity: {settings['windows']} x {settings['length']:,} tokens of prose that no "
        f"calibration saw; {_long_title(long_report)}: {long['windows']} x {long['length']:,}"
        f"{_other_conversions(report, long_report)}. Recall: {settings['recall_prompts']} numbers planted in text and "
        f"asked for at its end. Bytes are measured on the live cache ({report['created'][:10]}), those at 8k computed. "
        "Source and conversions, in code font, also keep 4 tokens in full precision. The others are "
        "[caches of engines](docs/research/engine-caches.md); oscar_int2 and kvarn are our readings of their papers. "
        f"Tokens/s: [bfloat16, two CPU cores](docs/kernels.md#on-a-cpu), {CONTEXT:,} tokens in the cache; healing does "
        "not change it. "
        "Reports: [1k](docs/smollm2/rows/report.md), [8k](docs/smollm2/rows-8k/report.md), "
        "[keys](docs/smollm2/rows-recall/report.md)."
    )
    return textwrap.fill(text, 130, break_long_words=False, break_on_hyphens=False)


def table(report: dict[str, Any], long_report: dict[str, Any]) -> str:
    """Return the Markdown table: the source, then the other rows by decreasing KV bytes."""
    columns_by_key = {column.key: column for column in columns(report)}
    long_rows = {row["name"]: row for row in long_report["rows"]}
    rows = sorted(report["rows"], key=lambda row: (row["role"] != "baseline", -row["kv"]["ratio"]))
    titles = list(SHOWN.values())
    column_index = titles.index(SHOWN["loss_change"]) + 1
    titles.insert(column_index, _long_title(long_report))
    titles.append("tokens/s, 8k")
    steps = median_steps()
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    for row in rows:
        name = row["name"] if row["role"] == "variant" else f"`{row['name']}`"
        cells = [columns_by_key[key].text(row, report) for key in SHOWN]
        in_long = long_rows.get(row["name"])
        cells.insert(
            column_index, columns_by_key["loss_change"].text(in_long, long_report) if in_long else "not measured"
        )
        name_of_steps = row["name"].removesuffix("-healed")  # healing changes no shapes and no bits
        step = min(steps.get((name_of_steps, accelerated, CONTEXT), math.inf) for accelerated in (False, True))
        cells.append(f"{1 / step:.1f}" if step < math.inf else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", caption(report, long_report), ""])


def _other_conversions(report: dict[str, Any], long_report: dict[str, Any]) -> str:
    """Return a remark if checkpoints of the same name differ between the reports, or an empty string."""
    hashes = [{row["name"]: row["sha256"] for row in each["rows"]} for each in (report, long_report)]
    is_same = all(hashes[0].get(name, sha256) == sha256 for name, sha256 in hashes[1].items())
    return "" if is_same else f", with earlier conversions ({long_report['created'][:10]})"


def _long_title(long_report: dict[str, Any]) -> str:
    return f"Δ loss, {long_report['settings']['length'] // 1024}k"


def with_parts(readme: str, *parts: str) -> str:
    """Return the README with the parts inserted between its marks, in order."""
    remaining = iter(parts)
    return re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: BEGIN + next(remaining) + END, readme, flags=re.DOTALL
    )


if __name__ == "__main__":
    report, long_report = read_report(REPORT), read_report(LONG_REPORT)
    parts = hook(report, read_report(RECALL_REPORT)), table(report, long_report)
    readme = with_parts(README.read_text(encoding="utf-8"), *parts)
    README.write_text(readme, encoding="utf-8")
    for folder in (path.parent for path in (ROOT / "docs").rglob("report.json")):
        published = read_report(folder)
        plots = save_plots(published, folder)
        (folder / "report.md").write_text(markdown.render(published, plots), encoding="utf-8")
    print(README, "docs/**/report.md", "docs/**/*.svg", sep="\n")
