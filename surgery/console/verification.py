"""What ``surgery verify`` prints."""

from __future__ import annotations

from surgery.console.page import make_table, new_page, plain, print_json


def show_verified(verified, *, as_json: bool = False) -> None:
    """Prints the checks of a checkpoint (:class:`surgery.verification.outcomes.Verified`)."""
    if as_json:
        print_json(verified.to_dict())
        return
    page = new_page()
    page.print(f"\n[bold]{plain(verified.path)}[/bold]", soft_wrap=True)
    page.print(make_table(["check", "outcome", ""], [(each.name, each.outcome, each.said) for each in verified.checks]))
    if verified.good:
        left = ", ".join(each.name for each in verified.unchecked)
        page.print("Nothing is wrong with it" + (f"; not checked: {left}" if left else ""))
