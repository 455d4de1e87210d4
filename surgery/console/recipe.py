"""Output of `surgery run`: the steps of a recipe, and their results."""

from __future__ import annotations

from typing import Any

from surgery.common.human import duration, size
from surgery.common.tables.table import Column
from surgery.console.page import make_table, new_page, plain, print_json, typed
from surgery.console.verdicts import of_conversion, of_healing, show_next

AMOUNTS = {
    "seconds": ("time", duration),
    "host": ("memory", size),
    "device": ("accelerator memory", size),
    "disk": ("disk", size),
    "temporary": ("temporary files", size),
}
"""Columns of a step's amounts: title and format."""


def show_plan(plan: dict[str, Any], *, as_json: bool = False) -> None:
    """Print the dry run of a recipe (:func:`surgery.workflow.dry_run.plan_recipe`)."""
    if as_json:
        print_json(plan)
        return
    page, total, steps = new_page(), plan["total"], plan["steps"]
    amounts = {name: amount for name, amount in AMOUNTS.items() if total[name]}
    rows = [
        (
            number,
            step["command"],
            step["name"],
            step["to"] or "",
            *(amount(step[name]) if step[name] else "" for name, (_, amount) in amounts.items()),
            ", ".join(filter(None, ("exists" if step["exists"] else "", step["note"]))),
        )
        for number, step in enumerate(steps, 1)
    ]
    if amounts:
        rows.append(("", "", "total", "", *(amount(total[name]) for name, (_, amount) in amounts.items()), ""))
    columns = [Column(title, align="right") for title, _ in amounts.values()]
    page.print(make_table(["", "command", "step", "to", *columns, f"in {plan['work']}"], rows))
    page.print(
        "All settings and names are valid; nothing was run. A step's figures are those of its command with --dry-run "
        "on this machine. Total: the sum; for memory and temporary files, the largest of all steps.",
        soft_wrap=True,
    )
    show_next(page, ["the same command without --dry-run"])


def show_made(finished) -> None:
    """Print one line per checkpoint of a finished recipe (:class:`surgery.workflow.recipe.Finished`)."""
    from surgery.reporting.report import previous_report  # imports torch

    page = new_page()
    for name, path in finished.checkpoints.items():
        report = previous_report(path)
        if report is None:  # a healed checkpoint that this package did not convert
            continue
        verdict = of_healing(report["healing"]) if report.get("healing") else of_conversion(report)
        page.print(f"[bold]{plain(name)}[/bold]: {plain(verdict)}", soft_wrap=True)
    if finished.report is None and finished.checkpoints:  # a report prints its own next command
        paths = [typed(path) for path in finished.checkpoints.values()]
        show_next(page, [f"surgery eval {' '.join(paths)}", f"surgery doctor {paths[-1]}"])
