"""The figures of docs/healing.md are those of the report that is committed beside it."""

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_table_is_the_report():
    report = json.loads((DOCS / "testbed" / "healing" / "report.json").read_text(encoding="utf-8"))
    results = {row["name"]: row["results"] for row in report["rows"]}
    source = results["source"]["loss"]["loss"]
    text = (DOCS / "healing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \| (\d+)% \| ([\d.]+)% \| ([\d.]+)% \|", text, re.M)
    assert {row[0] for row in rows} == {"mla-4", "mla-8", "gqa-2", "mqa", "lowrank-8", "hybrid-12"}
    for name, before, after, closed, recall_before, recall_after in rows:
        converted, healed = results[name], results[f"{name}-healed"]
        losses = [each["loss"]["loss"] for each in (converted, healed)]
        assert [before, after] == [f"{loss:.4f}" for loss in losses]
        assert closed == f"{100 * (losses[0] - losses[1]) / (losses[0] - source):.0f}"
        recalls = [f"{100 * each['recall']['accuracy']:.1f}" for each in (converted, healed)]
        assert [recall_before, recall_after] == recalls
