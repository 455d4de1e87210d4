"""The figures of docs/healing.md are those of the report that is committed beside it."""

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_table_is_the_report():
    report = json.loads((DOCS / "testbed" / "healing" / "report.json").read_text(encoding="utf-8"))
    results = {row["name"]: row["results"] for row in report["rows"]}
    source, trained = (results[name]["loss"]["loss"] for name in ("source", "source-trained"))
    text = (DOCS / "healing.md").read_text(encoding="utf-8")
    number, share = r" ([\d.]+) \|", r" (\d+)% \|"
    row = r"^\| `([\w-]+)` \|" + 2 * number + 2 * share + 2 * number + 2 * r" ([\d.]+)% \|"
    rows = re.findall(row, text, re.M)
    assert {row[0] for row in rows} == {"mla-4", "mla-8", "gqa-2", "mqa", "lowrank-8", "hybrid-12"}
    for name, *shown in rows:
        both = results[name], results[f"{name}-healed"]
        before, after = (each["loss"]["loss"] for each in both)
        expected = [f"{before:.4f}", f"{after:.4f}"]
        expected += [f"{100 * (before - after) / (before - least):.0f}" for least in (source, trained)]
        expected += [f"{each['loss']['divergence']['kl']:.4f}" for each in both]
        expected += [f"{100 * each['recall']['accuracy']:.1f}" for each in both]
        assert shown == expected
