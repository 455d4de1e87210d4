"""Markdown rendering of a report: verdict, headline table, plots, and the tables that no plot shows."""

from __future__ import annotations

from collections.abc import Iterable

from surgery.common.human import decimal, duration, in_markdown, one_line, size
from surgery.common.tables import markdown
from surgery.common.tables.table import Column, Table
from surgery.eval.report.document import dig
from surgery.eval.report.figures import PLOTS
from surgery.eval.report.tables import Report, by_bytes, headline
from surgery.eval.report.verdict import verdict


def render(report: Report, pictures: Iterable[str] = ()) -> str:
    """Render a report, with links to the SVG files of the plots ``pictures``, which are keys of `figures.PLOTS`."""
    report = by_bytes(report)
    table, settings, environment = headline(report), report["settings"], report.get("environment") or {}
    machine = environment.get("device_name", settings["device"])
    versions = ", ".join(f"{name} {environment.get(name)}" for name in ("torch", "transformers"))
    measured = f"Quality in {settings['dtype']} on {machine}, seed {settings['seed']}, {versions}."
    parts = [
        f"# {in_markdown(report['title'])}",
        f"**A quick look: at most {settings['limit']} samples a task.**" if settings.get("limit") else None,
        "\n".join(f"- {in_markdown(line)}" for line in verdict(report)),
        markdown.render(table),
        markdown.explanations(table),
        *map(in_markdown, table.notes),
        *(f"![{PLOTS[key].title}]({key}.svg)" for key in pictures),
        *(f"## {title}\n\n{markdown.render(each)}" for title, each in _details(report).items() if each.rows),
        *_completions(report),
        f"{in_markdown(measured)} Every number: `report.json`.",
        f"    {one_line(report['command'])}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _details(report: Report) -> dict[str, Table]:
    """Build the tables below the plots by title; those without data have no rows."""
    rows = report["rows"]
    losses = {row["name"]: dig(row, "results", "loss", "by_source") or {} for row in rows}
    sources = list(dict.fromkeys(source for each in losses.values() for source in each))
    by_source = [(name, *(dig(each, source, "loss") for source in sources)) for name, each in losses.items()]
    conversions = [
        (
            row["name"],
            " ".join(str(each[key]) for key in ("to", "method") if each.get(key))
            + ", healed" * bool(each.get("healing")),
            each.get("seconds"),
            each.get("peak_memory_bytes"),
            each.get("command"),
        )
        for row in rows
        if (each := row.get("conversion"))
    ]
    columns = ["", "conversion", Column("time", "", duration), Column("peak memory", "", size), "command"]
    loss_columns = [Column(source, "", lambda value: decimal(value, 4)) for source in sources]
    return {
        "Loss by source, nats per token": Table.of(["", *loss_columns], by_source if len(sources) > 1 else []),
        "How rows were made": Table.of(columns, conversions),
    }


def _completions(report: Report) -> list[str]:
    """Render the completions, which models wrote, as code blocks: one for each prompt, with a line for each row."""
    texts: dict[str, list[str]] = {}
    for row in report["rows"]:
        for one in dig(row, "results", "generate", "completions") or []:
            texts.setdefault(one["prompt"], []).append(f"    {one_line(row['name'])}: {one_line(one['text'])}")
    blocks = ["\n".join([f"    prompt: {one_line(prompt)}", *lines]) for prompt, lines in texts.items()]
    return (
        ["## Completions", "Greedy, without selection: each prompt, and what each row wrote.", *blocks]
        if blocks
        else []
    )
