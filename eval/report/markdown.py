"""Markdown rendering of a report: verdict and headline table."""

from __future__ import annotations

from surgery.common.human import in_markdown, one_line
from surgery.common.tables import markdown
from surgery.eval.report.tables import Report, by_bytes, headline
from surgery.eval.report.verdict import verdict


def render(report: Report) -> str:
    """Render the verdict, the headline table and explanations of its columns."""
    table, settings, environment = headline(by_bytes(report)), report["settings"], report.get("environment") or {}
    machine = environment.get("device_name", settings["device"])
    versions = ", ".join(f"{name} {environment.get(name)}" for name in ("torch", "transformers"))
    measured = f"Quality in {settings['dtype']} on {machine}, seed {settings['seed']}, {versions}."
    parts = [
        f"# {in_markdown(report['title'])}",
        f"**A quick look: at most {settings['limit']} samples a task.**" if settings.get("limit") else None,
        *map(in_markdown, verdict(report)),
        markdown.render(table),
        markdown.explanations(table),
        *map(in_markdown, table.notes),
        f"{in_markdown(measured)} All of it, with plots: `report.html`; every number: `report.json`.",
        f"    {one_line(report['command'])}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
