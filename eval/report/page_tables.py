"""The page's tables of measurements. Each takes the report and gives None if there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from surgery.common.human import decimal, share, size
from surgery.eval.report.markup import Markup, joined, tag
from surgery.eval.report.style import looks
from surgery.eval.report.tables import NONE, Column, Report, Row, columns, described, dig, interval, lm_eval_tasks

MOST_SOURCES_ACROSS = 6
ARROWS = {"low": "\u00a0↓", "high": "\u00a0↑", None: ""}


def headline(report: Report) -> Markup:
    """One line a row, the columns of `tables.columns`; changes from the baseline with their intervals below."""
    shown = columns(report)
    heads = [
        tag(
            "th",
            column.title + ARROWS[column.better],
            title=column.about,
            scope="col",
            class_="short" if len(column.title) <= 6 else None,  # or it breaks at a hyphen
            data_better=column.better,
        )
        for column in shown
    ]
    lines = []
    for row, mark in zip(report["rows"], row_marks(report), strict=True):
        first = tag("th", mark, row["name"], tag("small", described(row)), scope="row", data_value=row["name"])
        cells = [_cell(column, row, report) for column in shown if column.key != "name"]
        lines.append(tag("tr", first, *cells, class_="baseline" if row.get("role") == "baseline" else None))
    return joined(
        _table(heads, lines, "wide"),
        tag("p", _legend(report, shown), class_="note"),
    )


def row_marks(report: Report) -> list[Markup]:
    """A small mark in each row's colour and shape, as in the plots."""
    return [
        tag(
            "span",
            class_=f"mark {row.get('role') or ''}",
            style=f"border-color: {look.colour}; background: {look.colour}",
            aria_hidden="true",
        )
        for row, look in zip(report["rows"], looks(report), strict=True)
    ]


def table(
    report: Report, heads: Sequence[str], lines: Iterable[tuple[Row, Sequence[object]]], caption: str | None = None
) -> Markup:
    """A sortable table whose first column names rows of the report.

    Args:
        heads: titles of the other columns.
        lines: a row and its cells: text, `Markup` or (exact value to sort by, text).
    """
    marks = dict(zip((id(row) for row in report["rows"]), row_marks(report), strict=True))
    lines = list(lines)
    words = [isinstance(cell, str) for cell in lines[0][1]] if lines else []
    body = [
        tag("tr", tag("th", marks[id(row)], row["name"], scope="row", data_value=row["name"]), *map(_plain_cell, cells))
        for row, cells in lines
    ]
    titles = [
        tag("th", head, scope="col", class_="text" if word else None) for head, word in zip(heads, words, strict=True)
    ]
    return _table([tag("th", "row", scope="col"), *titles], body, caption=caption)


def by_source(report: Report) -> Markup | None:
    """Loss as perplexity and bits a byte, and of each source of the text: a column each, or a line each if many."""
    rows = [row for row in report["rows"] if dig(row, "results", "loss")]
    if not rows:
        return None
    losses = {id(row): dig(row, "results", "loss", "by_source") or {} for row in rows}
    sources = list(dict.fromkeys(source for mine in losses.values() for source in mine))
    across = sources if len(sources) <= MOST_SOURCES_ACROSS else []
    lines = []
    for row in rows:
        whole = row["results"]["loss"]
        parts = [dig(losses[id(row)], source, "loss") for source in across]
        numbers = [*parts, whole.get("loss"), whole.get("perplexity"), whole.get("bits_per_byte")]
        lines.append((row, [_number(value, 4) for value in numbers]))
    caption = "Loss by source, nats a token" if across else "Loss, nats a token"
    found = table(report, [*across, "all", "perplexity", "bits/byte"], lines, caption)
    if across or not sources:
        return found
    down = [
        tag(
            "tr",
            tag("th", source, scope="row", data_value=source),
            *(_plain_cell(_number(dig(losses[id(row)], source, "loss"), 4)) for row in rows),
        )
        for source in sources
    ]
    heads = [tag("th", head, scope="col") for head in ("source", *(row["name"] for row in rows))]
    return joined(found, _folded(_table(heads, down, caption="Loss by source, nats a token")))


def recall(report: Report) -> Markup | None:
    """Recall with the number of prompts behind it."""
    rows = [row for row in report["rows"] if dig(row, "results", "recall")]
    lines = []
    for row in rows:
        result, change = row["results"]["recall"], dig(row, "comparison", "recall")
        told = interval(change, percent=True) if change else NONE
        lines.append(
            (
                row,
                [
                    (result.get("accuracy"), share(result.get("accuracy"))),
                    (dig(change, "difference"), told),
                    result.get("prompts"),
                    result.get("length"),
                ],
            )
        )
    heads = ["keys given back", "change in points, 95% interval", "prompts", "tokens a prompt"]
    return table(report, heads, lines) if lines else None


def ruler(report: Report) -> Markup | None:
    """What the heat map cannot say: averages by length, and what a star means."""
    rows = [row for row in report["rows"] if dig(row, "results", "ruler", "lengths")]
    if not rows:
        return None
    lengths = sorted({n for row in rows for n in row["results"]["ruler"]["lengths"]}, key=int)
    lines = []
    for row in rows:
        averages = [dig(row, "results", "ruler", "lengths", length, "average") for length in lengths]
        averages.append(dig(row, "results", "ruler", "average"))
        lines.append((row, [(value, share(value)) for value in averages]))
    star = "* made-up stand-in data in place of the published set. RULER-style: not comparable with published RULER."
    heads = [f"{int(length):,} tokens" for length in lengths]
    return joined(tag("p", star, class_="note"), table(report, [*heads, "all"], lines, "Average score"))


def repeat(report: Report) -> Markup | None:
    """Losses of both occurrences of a span, by lag."""
    lines = []
    for row in report["rows"]:
        for lag, part in (dig(row, "results", "repeat", "lags") or {}).items():
            losses = [(part[key], decimal(part[key], 4)) for key in ("first", "second")]
            change = part["change"]
            lines.append((row, [int(lag), *losses, (change["difference"], interval(change, percent=False))]))
    heads = ["lag, tokens", "first time", "second time", "second minus first, 95% interval"]
    return table(report, heads, lines, "Loss of a span of text, nats a token") if lines else None


def lm_eval(report: Report) -> Markup | None:
    """Every metric of every lm-eval task, with its standard error."""
    lines = []
    for row in report["rows"]:
        for task in lm_eval_tasks(row):
            result = row["results"][task]
            for metric, measured in (result.get("metrics") or {}).items():
                value, error = measured.get("value"), measured.get("stderr")
                shown = value
                if isinstance(value, int | float):
                    shown = value, decimal(value, 4) + (f" ± {error:.4f}" if isinstance(error, int | float) else "")
                cells = [
                    task.removeprefix("lm-eval:"),
                    metric,
                    shown,
                    result.get("n_samples"),
                    result.get("n_shot"),
                    result.get("lm_eval"),
                ]
                lines.append((row, cells))
    heads = ["task", "metric", "value ± standard error", "samples", "shots", "lm_eval"]
    return table(report, heads, lines) if lines else None


def memory(report: Report) -> Markup | None:
    """Bytes by context, the peaks above the weights, and how they were taken."""
    lines = []
    for row in report["rows"]:
        result = dig(row, "results", "memory") or {}
        for part in result.get("contexts") or []:
            keys = ("cache_bytes", "peak_prefill_bytes", "peak_decode_bytes")
            cells = [(part["context"], f"{part['context']:,}"), *(_bytes(part.get(key)) for key in keys)]
            lines.append((row, [*cells, _bytes(result.get("weights_bytes")), part.get("note") or ""]))
    if not lines:
        return None
    how = list(dict.fromkeys(filter(None, (dig(row, "results", "memory", "how") for row in report["rows"]))))
    heads = ["context", "KV cache", "peak of prefill", "peak of decoding", "weights", ""]
    return joined(tag("p", "; ".join(how), class_="note") if how else None, _folded(table(report, heads, lines)))


def speed(report: Report) -> Markup | None:
    """Tokens a second measured and at the roofline, by context and batch."""
    lines = []
    for row in report["rows"]:
        for point in dig(row, "results", "speed", "points") or []:
            decode, roof = point.get("decode_tokens_per_second"), dig(point, "roofline", "decode_tokens_per_second")
            reached = decode / roof if decode and roof else None
            cells = [
                (point["context"], f"{point['context']:,}"),
                point["batch"],
                _number(point.get("prefill_tokens_per_second"), 0),
                _number(decode, 1),
                _number(roof, 1),
                (reached, share(reached)),
                dig(point, "roofline", "bound") or point.get("note") or NONE,
            ]
            lines.append((row, cells))
    if not lines:
        return None
    heads = ["context", "batch", "prefill tok/s", "decode tok/s", "roofline tok/s", "reached", "bound by"]
    return joined(tag("p", _ceilings(report), class_="note"), _folded(table(report, heads, lines)))


def _folded(long: Markup) -> Markup:
    """A long table that a plot has shown already, behind a line that opens it."""
    return tag("details", tag("summary", "All numbers"), long)


def _ceilings(report: Report) -> str:
    """What the machine was measured to do, of the first row that says so."""
    result = next(r for row in report["rows"] if (r := dig(row, "results", "speed") or {}).get("points"))
    parts = [f"{result.get('dtype')} on {result.get('device')}", f"medians of {result.get('repeats')} repeats"]
    moved, computed = dig(result, "ceilings", "bytes_per_second"), dig(result, "ceilings", "flops_per_second")
    if moved and computed:
        parts.append(f"measured ceilings {moved / 1e9:,.1f} GB/s and {computed / 1e9:,.0f} GFLOP/s")
    return "; ".join(parts) + ". The roofline is the time to read weights and cache once, or to do the arithmetic."


def _cell(column: Column, row: Row, report: Report) -> Markup:
    value, below, verdict = column.value(row, report), column.change_text(row), column.verdict(row)
    text = column.text(row, report)
    return tag(
        "td",
        tag("b", text) if verdict else text,
        # The interval goes below the change: side by side they make the table wider than a screen.
        *(tag("small", part) for part in (below or "").replace(" [", "\n[").splitlines()),
        class_=verdict,
        data_value=_sort_key(value),
    )


def _plain_cell(cell: object) -> Markup:
    if isinstance(cell, Markup):
        return tag("td", cell, class_="text")
    value, text = cell if isinstance(cell, tuple) else (cell, NONE if cell is None else cell)
    wordy = isinstance(value, str)
    return tag("td", text, class_="text" if wordy else None, data_value=_sort_key(value))


def _sort_key(value: object) -> object:
    """What the page's script sorts by; values that are missing or not finite are left to their text."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return NONE
    return value


def _number(value: float | None, digits: int) -> tuple[float | None, str]:
    return value, NONE if value is None else f"{value:,.{digits}f}"


def _bytes(value: float | None) -> tuple[float | None, str]:
    return value, NONE if value is None else size(value)


def _legend(report: Report, shown: Sequence[Column]) -> str:
    context = next((c for row in report["rows"] if (c := dig(row, "kv", "context"))), None)
    parts = [f"KV bytes held live at {context:,} tokens, batch 1." if context else ""]
    if report.get("baseline") and any(column.compared for column in shown):
        parts.append(
            f"Small print: change from {report['baseline']} with its 95% interval, paired bootstrap over samples; "
            "shares in percentage points. Coloured: the interval does not hold zero."
        )
    return " ".join(filter(None, parts))


def _table(heads: Sequence[Markup], lines: Sequence[Markup], class_: str = "", caption: str | None = None) -> Markup:
    inner = tag(
        "table",
        tag("caption", caption) if caption else None,
        tag("thead", tag("tr", *heads)),
        tag("tbody", *lines),
        class_=f"sortable {class_}".strip(),
    )
    return tag("div", inner, class_="scroll")
