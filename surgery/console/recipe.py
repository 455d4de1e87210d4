"""What `surgery run` prints: the steps of a recipe, and what they made."""

from __future__ import annotations

from pathlib import Path

from surgery.console.page import make_table, new_page, plain, print_json
from surgery.console.verdicts import of_conversion, of_healing


def show_steps(recipe, work: Path | None, *, as_json: bool = False) -> None:
    """Prints a recipe (:class:`surgery.workflow.recipe.Recipe`) whose settings and names were checked."""
    work = work or Path(recipe.name)
    steps = [
        {"verb": step.verb, "name": step.name, "to": step.settings.get("to"), "there": (work / step.name).exists()}
        for step in recipe.steps
    ]
    if as_json:
        print_json({"name": recipe.name, "work": str(work), "steps": steps})
        return
    rows = [
        (number, each["verb"], each["name"], each["to"] or "", "there" if each["there"] else "")
        for number, each in enumerate(steps, 1)
    ]
    page = new_page()
    page.print(make_table(["", "verb", "step", "to", f"in {work}"], rows))
    page.print("settings and names are right; nothing was run")


def show_made(finished) -> None:
    """Prints the checkpoints that a recipe's steps made (:class:`surgery.workflow.recipe.Finished`), a line each."""
    from surgery.reporting.report import previous_report  # which loads torch

    page = new_page()
    for name, path in finished.checkpoints.items():
        report = previous_report(path)
        if report is None:  # healed, and no conversion of ours
            continue
        told = of_healing(report.get("healing") or {"table": []}) or of_conversion(report)
        page.print(f"[bold]{plain(name)}[/bold]: {plain(told)}", soft_wrap=True)
