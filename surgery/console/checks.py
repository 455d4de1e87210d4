"""What ``surgery verify`` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from surgery.console.page import make_table, new_page, plain, print_json

if TYPE_CHECKING:
    from surgery.inspection.checks import Checked


def show_checks(checked: Checked, *, as_json: bool) -> None:
    """A line a check."""
    if as_json:
        print_json({**asdict(checked), "failed": bool(checked.failed)})
        return
    page = new_page()
    page.print(f"\n[bold]{plain(checked.path)}[/bold]")
    page.print(make_table(["check", "", ""], [(each.name, each.outcome, each.said) for each in checked.checks]))
