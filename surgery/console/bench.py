"""Output of `surgery bench`."""

from __future__ import annotations

from pathlib import Path

from surgery.common.human import size
from surgery.common.tables.table import Column
from surgery.console.page import make_table, new_page, plain, print_json


def show_decoding(record: dict, path: Path, *, as_json: bool = False) -> None:
    """Print a record of :func:`surgery.bench.decode.measure_decoding`."""
    if as_json:
        print_json(record)
        return
    page = new_page()
    page.print(f"\n[bold]{plain(record['device']['name'])}[/bold]; caches of {plain(record['cache'])}", soft_wrap=True)
    page.print(make_table(DECODING, map(_decode_row, record["rows"])))
    if record["note"]:
        page.print(plain(record["note"]), soft_wrap=True)
    page.print(plain(path), soft_wrap=True)


def _decode_row(row: dict) -> tuple:
    remark = row.get("skipped") or ("largest batch" if row["largest"] else "")
    return (row["model"], row["kind"], "ours" if row["accelerated"] else "stock", *map(row.get, DECODING_KEYS), remark)


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-2 else f"{seconds * 1e3:,.1f} ms"


def _ratio(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


DECODING_KEYS = (
    *("context", "batch", "tokens_per_second", "step_seconds", "graph_step_seconds", "peak_memory_bytes"),
    "times_source",
)
DECODING = (
    *("model", "attention", "kernels", Column("context", "", _tokens), "batch"),
    Column("tokens/s", "", lambda value: f"{value:,.0f}"),
    Column("step", "", _time),
    Column("CUDA graph", "", _time),
    Column("peak memory", "", size),
    Column("vs. source", "", _ratio),
    "",
)
