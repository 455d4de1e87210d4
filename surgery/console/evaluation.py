"""What ``surgery eval --dry-run`` prints: tables for people, or with ``as_json`` one JSON object and nothing else."""

from __future__ import annotations

from dataclasses import asdict

from surgery.common.human import count, per_token, size
from surgery.common.tables.table import Column
from surgery.console.page import make_table, new_page, plain, print_json
from surgery.console.verdicts import show_next


def show_plan(plan, *, as_json: bool = False) -> None:
    """Prints a dry run (:class:`surgery.forecast.evaluation.EvaluationPlan`)."""
    if as_json:
        print_json(asdict(plan))
        return
    page, settings = new_page(), plan.settings
    page.print(f"\n[bold]dry run: {plain(plan.out)}[/bold] (no model is run, nothing is written)")
    rows = [
        (
            row["name"],
            row["role"],
            per_token(row["kv"] / settings["context"]) if row["kv"] else "not known",
            size(row["weights"]),
            size(row["cache"]) if row["cache"] else "not known",
            size(row["weights"] + row["cache"]) if row["cache"] else "",
        )
        for row in plan.rows
    ]
    names = ("KV per token", "weights", "largest cache", "memory of both")
    page.print(make_table(["model", "", *(Column(name, align="right") for name in names)], rows))
    if plan.variants:
        page.print(f"and of {plain(plan.rows[0]['name'])}: {plain(', '.join(plan.variants))}", soft_wrap=True)
    for note in plan.notes:
        page.print(plain(note), soft_wrap=True)
    rows = [(task["name"], *_work(task["work"])) for task in plan.tasks]
    names = ("forward passes", "tokens read", "decoded one by one", "largest cache holds")
    page.print(make_table(["task, of one model", *(Column(name, align="right") for name in names)], rows))
    models, total = len(plan.rows) + len(plan.variants), plan.total
    page.print(
        f"{models} {'model' if models == 1 else 'models'}: {total['passes']:,} forward passes, {count(total['read'])} "
        f"tokens read, {count(total['decoded'])} decoded, at most"
    )
    page.print(
        f"held-out text: {plain(' and '.join(settings['data']))}, {settings['windows']} windows of "
        f"{settings['context']:,} tokens; quality in {_dtype(settings['dtype'])} on {settings['device']}, the rest in "
        "the checkpoint's own",
        soft_wrap=True,
    )
    page.print("Memory is weights and keys and values; activations and logits of a batch come on top.")
    goes_on = "; results that are there are not measured again" if plan.goes_on else ""
    page.print(f"to {plain(plan.out)}/: report.html, .json, .csv, .md and results/{goes_on}", soft_wrap=True)
    show_next(page, ["the same command without --dry-run"])


def _work(work: dict | None) -> tuple[str, ...]:
    if work is None:
        return "not known", "", "", ""
    held = f"{work['rows']} x {work['length']:,} tokens"
    return f"{work['passes']:,}", count(work["read"]), count(work["decoded"]), held


def _dtype(name: str) -> str:
    return "the checkpoint's dtype" if name == "auto" else name
