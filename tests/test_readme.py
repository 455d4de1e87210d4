"""Every figure of the README's testbed table is the report's."""

from pathlib import Path

import pytest

from surgery.eval.report.document import read_report
from surgery.eval.report.tables import columns

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("kv_bytes_per_token", "kv_ratio", "loss_change", "cached_loss", "recall", "needle", "ruler")


def table_of_the_readme() -> list[list[str]]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text[text.index("## What it costs") :]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows[2:] if len(row) == 1 + len(SHOWN)]


def table_of_the_report() -> dict[str, list[str]]:
    report = read_report(ROOT / "docs" / "testbed")
    chosen = {column.key: column for column in columns(report)}
    return {row["name"]: [chosen[key].text(row, report) for key in SHOWN] for row in report["rows"]}


def test_the_table_is_the_report():
    found, report = table_of_the_readme(), table_of_the_report()
    assert len(found) >= 10
    for name, *cells in found:
        assert cells == report[name.strip("`")], name


@pytest.mark.parametrize("name", ["report.json", "report.csv", "report.html", "report.md"])
def test_the_report_is_whole(name):
    assert (ROOT / "docs" / "testbed" / name).stat().st_size > 1000
    assert not read_report(ROOT / "docs" / "testbed")["settings"]["limit"]
