"""Output of `surgery bench`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from surgery.common.human import size
from surgery.common.tables.table import Column
from surgery.console.page import make_table, new_page, plain, print_json


def show_kernels(record: dict, path: Path, *, as_json: bool = False) -> None:
    """Print a record of `kernels/bench/run.py`."""
    if as_json:
        print_json(record)
        return
    page, limits = new_page(), record["ceilings"]
    page.print(f"\n[bold]{plain(record['device']['name'])}[/bold]")
    if limits:
        page.print(
            f"ceilings measured in this run: copy {limits['bytes_per_second'] / 1e12:.2f} TB/s, read and written bytes"
            f" both counted; bf16 product {limits['flops_per_second'] / 1e12:.0f} TFLOP/s",
            soft_wrap=True,
        )
    page.print(make_table(KERNELS, map(_kernel_row, record["rows"])))
    for row in record["rows"]:
        if "gate" in row and not row["gate"]["passed"]:
            case = f"{row['operation']} {row['model']} {row['variant']}, batch {row['batch']}, {row['context']} tokens"
            page.print(f"[bold red]wrong[/bold red] {plain(case)}: {plain('; '.join(row['gate']['reasons']))}")
    _show_notes(page, record["note"], path)


def _kernel_row(row: dict) -> tuple:
    gate = row.get("gate") or {}
    case = (row["operation"], f"{row['model']} {row['variant']}", row["batch"], row["context"])
    return (*case, gate.get("error"), gate.get("times_best_library"), *map(row.get, KERNEL_KEYS), _remark(row, gate))


def _remark(row: dict, gate: dict) -> str | None:
    """Format the fastest baseline, or the reason why the kernel was not timed."""
    if "skipped" in row:
        return row["skipped"]
    if "seconds" not in row:
        return "correct" if gate["passed"] else "wrong: not timed"
    others = [(each["seconds"], name) for name, each in row.get("baselines", {}).items() if "seconds" in each]
    return f"{min(others)[1]} {_time(min(others)[0])}" if others else None


def show_decoding(record: dict, path: Path, *, as_json: bool = False) -> None:
    """Print a record of :func:`surgery.bench.decode.measure_decoding`."""
    if as_json:
        print_json(record)
        return
    page = new_page()
    page.print(f"\n[bold]{plain(record['device']['name'])}[/bold]; caches of {plain(record['cache'])}", soft_wrap=True)
    page.print(make_table(DECODING, map(_decode_row, record["rows"])))
    _show_notes(page, record["note"], path)


def _decode_row(row: dict) -> tuple:
    remark = row.get("skipped") or ("largest batch" if row["largest"] else "")
    return (row["model"], row["kind"], "ours" if row["accelerated"] else "stock", *map(row.get, DECODING_KEYS), remark)


def _show_notes(page: Console, note: str | None, path: Path) -> None:
    if note:
        page.print(plain(note), soft_wrap=True)
    page.print(plain(path), soft_wrap=True)


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us" if seconds < 1e-2 else f"{seconds * 1e3:,.1f} ms"


def _ratio(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


KERNEL_KEYS = (
    *("seconds", "bytes_per_second", "share_of_copy", "flops_per_second", "share_of_matmul"),
    "speedup_over_source",
)
KERNELS = (
    *("operation", "shape", "batch", Column("context", "", _tokens)),
    Column("error", "", lambda value: f"{value:.1e}"),
    Column("vs. library", "", lambda value: f"{value:.1f}x"),
    Column("time", "", _time),
    Column("GB/s", "", lambda value: f"{value / 1e9:,.0f}"),
    Column("of copy", "", lambda value: f"{value:.0%}"),
    Column("TFLOP/s", "", lambda value: f"{value / 1e12:,.0f}"),
    Column("of matmul", "", lambda value: f"{value:.0%}"),
    Column("vs. source", "", _ratio),
    "fastest other",
)
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
