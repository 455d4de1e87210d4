"""Makes what the README shows of SmolLM2, the table in it and its picture, and the pages of all reports.

From docs/smollm2/rows/report.json, which `surgery run recipes/smollm2-rows.yaml` makes.

python tools/readme.py            # writes them; tests hold that they are current
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from surgery.eval.report import page, pareto
from surgery.eval.report.document import read_report
from surgery.eval.report.style import to_svg
from surgery.eval.report.tables import columns

ROOT = Path(__file__).resolve().parent.parent
REPORT, README = ROOT / "docs" / "smollm2" / "rows", ROOT / "README.md"
PICTURE = REPORT / "quality.svg"
SHOWN = {
    "kv_bytes_per_token": "KV B/token",
    "kv_ratio": "KV share",
    "loss_change": "Δ loss",
    "perplexity": "perplexity",
    "recall": "recall",
}
ANSWER = "mla-4"
"""Row that the sentence beneath the picture is about."""
BEGIN, END = "<!-- made by tools/readme.py -->\n", "<!-- end -->"


def hook(report: dict[str, Any]) -> str:
    """Return the sentence beneath the picture."""
    columns_by_key = {column.key: column for column in columns(report)}
    source, best = (next(row for row in report["rows"] if row["name"] == name) for name in ("source", ANSWER))
    share, source_perplexity, perplexity, recall, source_recall = (
        columns_by_key[key].text(row, report)
        for key, row in (
            ("kv_ratio", best),
            ("perplexity", source),
            ("perplexity", best),
            ("recall", best),
            ("recall", source),
        )
    )
    text = (
        f"Nothing was trained here. `{ANSWER}` (`surgery convert --to mla`) keeps {share} of the KV bytes: perplexity "
        f"{source_perplexity} → {perplexity}, planted keys found {source_recall} → {recall}."
    )
    return textwrap.fill(text, 130, break_long_words=False, break_on_hyphens=False) + "\n"


def caption(report: dict[str, Any]) -> str:
    """Return the sentence about the measurement."""
    settings = report["settings"]
    text = (
        f"How: loss in nats per token, and perplexity, on {settings['windows']} x {settings['length']:,} tokens of "
        f"prose that no calibration saw; recall of {settings['recall_prompts']} numbers that are planted in text and "
        f"asked for at its end; bytes of the live cache ({report['created'][:10]}). `{ANSWER}` asks for a quarter of "
        "the bytes; its first 4 tokens stay in full precision and come on top. The other rows are caches that vLLM "
        "has by itself, by its names for them. Intervals and KL divergences: [report](docs/smollm2/rows/report.md)."
    )
    return textwrap.fill(text, 130, break_long_words=False, break_on_hyphens=False)


def table(report: dict[str, Any]) -> str:
    """Return the Markdown table: the source, then the other rows by their bytes."""
    columns_by_key = {column.key: column for column in columns(report)}
    rows = sorted(report["rows"], key=lambda row: (row["role"] != "baseline", -row["kv"]["ratio"]))
    lines = [f"| | {' | '.join(SHOWN.values())} |", "|---|" + "---:|" * len(SHOWN)]
    for row in rows:
        name = row["name"] if row["role"] == "variant" else f"`{row['name']}`"
        lines.append(f"| {name} | {' | '.join(columns_by_key[key].text(row, report) for key in SHOWN)} |")
    return "\n".join([*lines, "", caption(report), ""])


def with_parts(readme: str, *parts: str) -> str:
    """The README with these between its marks, one after the other."""
    remaining = iter(parts)
    return re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: BEGIN + next(remaining) + END, readme, flags=re.DOTALL
    )


if __name__ == "__main__":
    report = read_report(REPORT)
    PICTURE.write_text(to_svg(pareto.loss(report)), encoding="utf-8")
    readme = with_parts(README.read_text(encoding="utf-8"), hook(report), table(report))
    README.write_text(readme, encoding="utf-8")
    for folder in (path.parent for path in (ROOT / "docs").rglob("report.json")):
        (folder / "report.html").write_text(page.render(read_report(folder)), encoding="utf-8")
    print(PICTURE, README, "docs/**/report.html", sep="\n")
