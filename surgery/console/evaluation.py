"""Output of ``surgery eval`` and ``surgery compare``: tables, or with ``as_json`` one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from surgery.common.human import per_token, size
from surgery.common.tables import terminal
from surgery.common.tables.table import Column
from surgery.console.page import make_table, new_page, plain, print_json
from surgery.console.verdicts import show_next


def show_evaluation(report: dict, paths: list[Path], *, as_json: bool = False) -> None:
    """Print the report of an evaluation and the paths of its files."""
    from surgery.eval.report.tables import by_bytes, headline
    from surgery.eval.report.verdict import verdict

    if as_json:
        print_json(report)
        return
    page, settings = new_page(), report["settings"]
    page.print(f"\n[bold]{plain(report['title'])}[/bold]")
    if settings["limit"]:
        page.print(f"[bold yellow]quick look: at most {settings['limit']} samples per task[/bold yellow]")
    table = headline(by_bytes(report), narrow=True)
    page.print(terminal.render(table))
    page.print(f"measured in {settings['dtype']} on {settings['device']}, seed {settings['seed']}")
    for note in table.notes:
        page.print(plain(note), soft_wrap=True)
    for line in verdict(report):
        page.print(f"[bold]{plain(line)}[/bold]", soft_wrap=True)
    for path in paths:
        if path.suffix != ".svg":
            page.print(plain(path), soft_wrap=True)


def show_plan(plan, *, as_json: bool = False) -> None:
    """Print the dry run of an evaluation (:class:`surgery.evaluation.dry_run.EvaluationPlan`)."""
    if as_json:
        print_json(asdict(plan))
        return
    page, settings = new_page(), plan.settings
    page.print(f"\n[bold]dry run: {plain(plan.out)}[/bold] (no model is run, nothing is written)")
    rows = [
        (
            row["name"],
            row["role"],
            per_token(row["kv"] / settings["context"]) if row["kv"] else "unknown",
            size(row["weights"]),
            size(row["cache"]) if row["cache"] else "unknown",
            size(row["weights"] + row["cache"]) if row["cache"] else "",
        )
        for row in plan.rows
    ]
    names = ("KV per token", "weights", "KV cache of a batch", "total memory")
    page.print(make_table(["model", "", *(Column(name, align="right") for name in names)], rows))
    if plan.variants:
        page.print(f"baselines of {plain(plan.rows[0]['name'])}: {plain(', '.join(plan.variants))}", soft_wrap=True)
    for note in plan.notes:
        page.print(plain(note), soft_wrap=True)
    page.print(
        f"measured: {plain(', '.join(plan.tasks))}; held-out text: {plain(' and '.join(settings['data']))}, "
        f"{min(settings['windows'], settings['limit'] or settings['windows'])} windows of "
        f"{settings['length']:,} tokens; quality in {_dtype(settings['dtype'])} on {settings['device']}, the "
        "other tasks in the checkpoint's dtype",
        soft_wrap=True,
    )
    page.print("Memory counts weights and KV cache, without the activations and logits of a batch.")
    reuse = "; existing results are reused" if plan.resumes else ""
    page.print(f"output: {plain(plan.out)}/: report.md with its plots, report.json and results/{reuse}", soft_wrap=True)
    show_next(page, ["the same command without --dry-run"])


def _dtype(name: str) -> str:
    return "the checkpoint's dtype" if name == "auto" else name
