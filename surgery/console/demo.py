"""Output of ``surgery demo``: a table, or with ``as_json`` one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.common.human import cost, decimal, duration, per_token, share, with_perplexity
from surgery.common.machine import seconds_since_start
from surgery.common.tables import terminal
from surgery.common.tables.table import Column, Table
from surgery.console.page import new_page, plain, print_json, typed
from surgery.console.verdicts import show_next


def show_demo(demo, *, as_json: bool = False) -> None:
    """Print the results of the demo (:class:`surgery.demo.run.Demo`)."""
    if as_json:
        print_json(demo.to_dict())
        return
    page, source, converted = new_page(), demo.source, demo.converted
    page.print("\n[bold]measured in transformers without this package[/bold]")
    page.print(f"source: {plain(demo.name)}", soft_wrap=True)
    rows = {"source": source, "converted": converted, "stock class": demo.stock, "stock class, healed": demo.healed}
    page.print(terminal.render(_table(rows)))
    page.print(f"[dim]{plain(demo.prompt)}[/dim]", highlight=False)
    for name, measured in rows.items():
        page.print(f"[bold]{name}[/bold] writes: {plain(measured.completion.strip())}", highlight=False, soft_wrap=True)
    page.print()
    result, model = typed(demo.path), typed(demo.model)
    ratio = share(converted.kv_bytes_per_token / source.kv_bytes_per_token)
    change = cost(converted.loss - source.loss, (source.recall, converted.recall))
    page.print(duration(seconds_since_start()))
    page.print(f"[bold]{plain(result)}[/bold]: {ratio} of the KV bytes for {change}", soft_wrap=True)
    gained = cost(demo.healed.loss - demo.stock.loss, (demo.stock.recall, demo.healed.recall))
    page.print(f"[bold]{plain(typed(f'{demo.path}-stock-healed'))}[/bold]: healing changed the loss by {gained}")
    commands = {
        f"surgery eval {result} --baseline {model}": "evaluates both next to cheap baselines",
        f"surgery convert --to crosslayer --kv-ratio 0.0625 {model}": "a sixteenth",
        "surgery inspect CKPT/": "KV cache and possible conversions of your model",
    }
    width = max(map(len, commands))
    show_next(page, [f"{command:{width}}   {why}" for command, why in commands.items()])


def _table(rows: Mapping[str, Any]) -> Table:
    """Build the table of all measurements, the source first."""
    heads = ("class", "KV per token", "share", "loss (perplexity)", "recall", "tokens/s")
    source = next(iter(rows.values()))
    lines = [
        (
            name,
            row.model_class,
            per_token(row.kv_bytes_per_token),
            share(row.kv_bytes_per_token / source.kv_bytes_per_token),
            with_perplexity(row.loss),
            decimal(row.recall, 2),
            f"{row.tokens_per_second:,.0f}",
        )
        for name, row in rows.items()
    ]
    return Table.of(["", *(Column(head, align="left" if head == "class" else "right") for head in heads)], lines)
