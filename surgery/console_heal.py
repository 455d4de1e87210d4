"""What the verb ``heal`` prints: a table for people, or with ``as_json`` one JSON object and nothing else."""

from __future__ import annotations

from surgery.console import make_table, new_page, plain, print_json
from surgery.human import count, decimal, duration, share, size


def show_healed(healed, *, as_json: bool = False) -> None:
    """Prints a finished healing (:class:`surgery.heal.Healed`)."""
    healing = healed.healing
    if as_json:
        print_json({"path": str(healed.path), **healing})
        return
    page = new_page()
    page.print(f"\n[bold]{plain(healed.path.name)}: healed[/bold]")
    if healing["quality"]:
        rows = [(e["name"], decimal(e["loss"], 4), decimal(e["recall"], 2)) for e in healing["quality"]]
        page.print(make_table(["", "held-out loss", "recall"], rows))
    if healing["gap_closed"] is not None:
        page.print(f"{share(healing['gap_closed'])} of the loss that the conversion cost was won back")
    speed = healing["tokens_per_second"]
    page.print(
        f"{count(healing['tokens'])} tokens in {healing['steps']:,} steps, {duration(healing['seconds'])}"
        + (f", {count(speed)} tokens/s" if speed else "")
        + f", peak memory {size(healing['peak_memory_bytes'])}; ended: {plain(healing['ended'])}"
    )
    page.print(f"[bold]{plain(healed.path)}[/bold]", soft_wrap=True)
