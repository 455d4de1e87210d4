"""Every figure of tables of reports in the README and in docs/results.md is the report's."""

from pathlib import Path

import pytest

from surgery.eval.report.document import read_report
from surgery.eval.report.tables import columns

ROOT = Path(__file__).resolve().parent.parent
# File, section, report, columns of the table, rows at least.
TABLES = [
    ("README.md", "## A real model", "smollm2", ("kv_bytes_per_token", "kv_ratio", "loss_change", "recall"), 5),
    (
        "docs/results.md",
        "# What it costs",
        "testbed",
        ("kv_bytes_per_token", "kv_ratio", "loss_change", "cached_loss", "recall", "needle", "ruler"),
        10,
    ),
]
REPORTS = [report for _, _, report, _, _ in TABLES]


def table_of(file: str, section: str, shown: tuple[str, ...]) -> list[list[str]]:
    text = (ROOT / file).read_text(encoding="utf-8")
    text = text[text.index(section) + len(section) :].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows[2:] if len(row) == 1 + len(shown)]


def table_of_the_report(name: str, shown: tuple[str, ...]) -> dict[str, list[str]]:
    report = read_report(ROOT / "docs" / name)
    chosen = {column.key: column for column in columns(report)}
    return {row["name"]: [chosen[key].text(row, report) for key in shown] for row in report["rows"]}


@pytest.mark.parametrize(("file", "section", "name", "shown", "least"), TABLES, ids=REPORTS)
def test_the_table_is_the_report(file, section, name, shown, least):
    found, report = table_of(file, section, shown), table_of_the_report(name, shown)
    assert len(found) >= least
    for row, *cells in found:
        assert cells == report[row.strip("`")], row


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("file", ["report.json", "report.csv", "report.html", "report.md"])
def test_the_report_is_whole(name, file):
    assert (ROOT / "docs" / name / file).stat().st_size > 1000
    assert not read_report(ROOT / "docs" / name)["settings"]["limit"]
