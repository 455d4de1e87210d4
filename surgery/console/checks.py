"""Output of ``surgery verify``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from surgery.checkpoint.named_models import name_of
from surgery.console.page import make_table, new_page, plain, print_json, typed
from surgery.console.verdicts import show_next

if TYPE_CHECKING:
    from surgery.inspection.checks import Checked


def show_checks(checked: Checked, *, as_json: bool) -> None:
    """Print one line per check and a summary."""
    if as_json:
        print_json({**asdict(checked), "failed": bool(checked.failed)})
        return
    page, called = new_page(), name_of(checked.path)
    page.print(f"\n[bold]{plain(called)}[/bold]")
    page.print(make_table(["check", "", ""], [(each.name, each.outcome, each.message) for each in checked.checks]))
    outcomes = [each.outcome for each in checked.checks]
    counted = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
    page.print(f"[bold]{plain(called)}[/bold]: {len(outcomes)} checks: {counted}", soft_wrap=True)
    if not checked.failed:
        show_next(page, [f"surgery doctor {typed(checked.path)}"])
