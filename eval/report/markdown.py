"""The headline table in Markdown, for places that show text files and no pages."""

from __future__ import annotations

from surgery.common.human import in_markdown, one_line
from surgery.eval.report.tables import SHARES, Report, columns


def render(report: Report) -> str:
    """A short document: what was measured, the table, what its numbers are."""
    shown = [column for column in columns(report) if column.key != "name"]
    settings, environment = report["settings"], report.get("environment") or {}
    lines = [
        f"# {_cell(report['title'])}",
        "",
        *([f"**A quick look: at most {settings['limit']} samples a task.**", ""] if settings.get("limit") else []),
        "| | " + " | ".join(column.title for column in shown) + " |",
        "|---|" + "---:|" * len(shown),
    ]
    for row in report["rows"]:
        cells = []
        for column in shown:
            told = column.is_difference or column.compared in SHARES
            change = column.change_text(row) if told else None
            cells.append(_cell(column.text(row, report)) + (f" <br>{_cell(change)}" if change else ""))
        lines.append(f"| {_cell(row['name'])} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {column.title}: {column.about}." for column in shown), ""]
    baseline = report.get("baseline")
    if baseline:
        lines += [
            f"Differences are to {_cell(baseline)}, with 95% intervals of a paired bootstrap over samples; those of "
            "shares in percentage points.",
            "",
        ]
    machine = environment.get("device_name", settings["device"])
    versions = ", ".join(f"{name} {environment.get(name)}" for name in ("torch", "transformers"))
    lines += [
        _cell(f"Quality in {settings['dtype']} on {machine}, seed {settings['seed']}, {versions}.") + " "
        "All of it, with plots: `report.html`; every number: `report.json`.",
        "",
        f"    {one_line(report['command'])}",
        "",
    ]
    return "\n".join(lines)


_cell = in_markdown
