"""Columns of a report's headline table, shared by terminal, Markdown and wandb.

A report is the plain dict that `surgery eval` writes as JSON. Any part may be missing: tasks that were not run, the
baseline, a comparison. A column defines the location of its value and its format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from surgery.common.human import decimal, perplexity, perplexity_text, share, with_perplexity
from surgery.common.tables.table import NONE, Cell, Column, Table
from surgery.eval.report.document import Report, ReportRow, baseline_of, dig, share_at

Value = float | str | None

MINUS = "\u2212"


@dataclass(frozen=True, kw_only=True)
class Measure(Column):
    """Headline column, with the location of its value in a row and of the difference from the baseline.

    Attributes:
        value: function from a row and its report to the unrounded value or text; None without a value.
        compared: key in the row's `comparison` of this column's difference; None without a comparison.
        is_difference: whether the value is that difference itself, so that only its interval is added.
        is_share: whether the difference is one of shares, shown in percentage points.
        error: key path in a row of the value's standard error; empty without one.
        on_terminal: whether the narrow table of the terminal includes the column.
    """

    value: Callable[[ReportRow, Report], Value]
    compared: str | None = None
    is_difference: bool = False
    is_share: bool = False
    error: tuple[str, ...] = ()
    on_terminal: bool = True

    def text(self, row: ReportRow, report: Report) -> str:
        """Format the value; a dash without one."""
        value = self.value(row, report)
        return NONE if value is None else self.form(value)

    def change(self, row: ReportRow) -> dict[str, float] | None:
        """Return `difference`, `low`, `high` of this row minus the baseline (95% interval); None if not compared."""
        return dig(row, "comparison", self.compared) if self.compared else None

    def change_texts(self, row: ReportRow) -> tuple[str, ...]:
        """Format the change and its interval, or only the interval of a change, or the value's standard error."""
        change, error = self.change(row), dig(row, *self.error) if self.error else None
        if isinstance(error, float):
            return (f"± {error:.4f}",)
        if change is None:
            return ()
        form = signed_points if self.is_share else signed
        return (() if self.is_difference else (form(change["difference"]),)) + interval(change, form)


def columns(report: Report) -> list[Measure]:
    """Return the headline columns for which at least one row has a value, in order."""
    every = [*HEADLINE, *_lm_eval_columns(report), *_headline_columns(report)]
    return [column for column in every if any(column.value(row, report) is not None for row in report["rows"])]


def by_bytes(report: Report) -> Report:
    """Sort the rows of a report by KV bytes per token, largest first; rows without a value come last."""
    bytes_of = {id(row): dig(row, "kv", "bytes_per_token") for row in report["rows"]}
    rows = sorted(report["rows"], key=lambda row: math.inf if bytes_of[id(row)] is None else -bytes_of[id(row)])
    return {**report, "rows": rows}


def headline(report: Report, *, narrow: bool = False) -> Table:
    """Build the headline table, the first table of every rendering of a report.

    For terminals, narrow: only columns `on_terminal`, and intervals only in columns of differences.
    """
    every = [column for column in columns(report) if column.on_terminal or not narrow]
    constant = {column.key: text for column in every if (text := _constant(column, report)) is not None}
    measures = [column for column in every if column.key not in constant]
    rows = [
        (
            row["name"],
            *(
                Cell(column.value(row, report), column.change_texts(row) if column.is_difference or not narrow else ())
                for column in measures
            ),
        )
        for row in report["rows"]
    ]
    return Table(
        [Column("", key="name"), *measures],
        rows,
        [
            *_notes(report, measures),
            *(f"{column.title}: {constant[column.key]}." for column in every if column.key in constant),
        ],
    )


def _constant(column: Measure, report: Report) -> str | None:
    """Return a note that replaces a column with equal texts in all rows; None if the column stays."""
    if column.compared or column.key in ALWAYS or len(report["rows"]) < 2:
        return None
    texts = [column.text(row, report) for row in report["rows"]]
    if texts == [KV_SHARE.text(row, report) for row in report["rows"]]:
        return f"as {KV_SHARE.title}"
    return f"{texts[0]} in every row" if len(set(texts)) == 1 else None


def _notes(report: Report, measures: Sequence[Measure]) -> list[str]:
    context = next((c for row in report["rows"] if (c := dig(row, "kv", "context"))), None)
    notes = [f"KV bytes held live at {context:,} tokens, batch 1."] if context else []
    if prompts := sorted({n for row in report["rows"] if (n := dig(row, "results", "recall", "prompts"))}):
        notes.append(f"Recall: n = {', '.join(map(str, prompts))} prompts.")
    if not report.get("baseline"):
        notes.append("There is no baseline to compare with.")
    elif any(column.compared for column in measures):
        notes.append(
            f"Differences are to {report['baseline']}, with paired 95% intervals over samples where there is more "
            "than one; those of shares in percentage points."
        )
    return notes


def signed(value: float, digits: int = 4) -> str:
    """Format a difference with its sign, using U+2212 for minus: ``+0.0600``, ``−0.0012``."""
    text = f"{abs(value):.{digits}f}"
    return text if float(text) == 0 else ("+" if value > 0 else MINUS) + text


def signed_points(value: float) -> str:
    """Format a difference of two shares in percentage points, without the unit: ``−4.2``."""
    return signed(100 * value, 1)


def bounds(change: dict[str, float]) -> tuple[float, float] | None:
    """Return the 95% interval of a change; None without an interval or with a single sample."""
    low, high = change.get("low"), change.get("high")
    return None if low is None or high is None or change.get("samples") == 1 else (low, high)


def interval(change: dict[str, float], form: Callable[[float], str] = signed) -> tuple[str, ...]:
    """Format the 95% interval of a change as one text, ``[+0.0500, +0.0700]``; () without an interval."""
    ends = bounds(change)
    return () if ends is None else (f"[{form(ends[0])}, {form(ends[1])}]",)


def _value_at(*path: str) -> Callable[[ReportRow, Report], Value]:
    return lambda row, report: dig(row, *path)


def _decimals(count: int) -> Callable[[float], str]:
    return lambda value: decimal(value, count)


def _perplexity(row: ReportRow, report: Report) -> float | None:
    return perplexity(dig(row, "results", "loss", "loss"))


def _memorized(key: str) -> Callable[[ReportRow, Report], Value]:
    return lambda row, report: dig(row, "results", "loss", "memorised", key) if report.get("baseline") else None


CONTEXTS = {1024: "1k", 8192: "8k", 32_768: "32k", 131_072: "128k"}
"""Context lengths of predicted KV bytes, with names; a fixed residual window weighs differently at each of them."""


def _share_at(tokens: int) -> Measure:
    """Build the column of predicted KV bytes at a context length, as a share of the baseline's."""

    return Measure(
        f"KV share, {CONTEXTS[tokens]}",
        f"KV bytes at {tokens:,} tokens by formula, relative to the baseline's",
        share,
        key=f"kv_ratio_{CONTEXTS[tokens]}",
        value=lambda row, report: share_at(row, report, tokens),
        on_terminal=False,
    )


def _loss_at(tokens: int) -> Measure:
    """Build the column of the loss change in the second half of a context, for windows longer than 1k tokens."""

    def value(row: ReportRow, report: Report) -> float | None:
        if row is (baseline := baseline_of(report)):
            return None
        buckets = [dig(each, "results", "loss", "by_position") or [] for each in (row, baseline)]
        if not all(buckets) or buckets[0][-1]["end"] <= min(CONTEXTS):
            return None
        pair = [next((part["loss"] for part in each if part["end"] == tokens), None) for each in buckets]
        return None if None in pair else pair[0] - pair[1]

    return Measure(
        f"Δ loss, {CONTEXTS[tokens]}",
        f"Loss minus the baseline's of the tokens at positions {tokens // 2:,} to {tokens - 1:,}, nats",
        signed,
        key=f"loss_change_{CONTEXTS[tokens]}",
        value=value,
        on_terminal=False,
    )


KV_SHARE = Measure(
    "KV share", "KV bytes relative to the baseline's", share, key="kv_ratio", value=_value_at("kv", "ratio")
)
ALWAYS = frozenset({"kv_bytes_per_token", "kv_ratio", "loss", "perplexity"})
"""Columns that stay in the table even if all rows have the same text."""

# fmt: off
HEADLINE: tuple[Measure, ...] = (
    Measure("KV B/token", "Bytes of the live KV cache per token at the report's context",
            lambda value: f"{value:,.0f}", key="kv_bytes_per_token", value=_value_at("kv", "bytes_per_token")),
    KV_SHARE,
    *map(_share_at, CONTEXTS),
    Measure("KV peak", "Peak KV bytes with the prompt read in one pass, relative to the baseline's",
            share, key="kv_peak", value=_value_at("kv", "peak_ratio")),
    Measure("KV footprint", "Share of the query-key pairs of full causal attention that were computed",
            share, key="kv_footprint", value=_value_at("kv", "footprint")),
    Measure("loss", "Mean cross-entropy, nats per token",
            _decimals(4), key="loss", value=_value_at("results", "loss", "loss")),
    Measure("perplexity", "exp of the mean loss",
            perplexity_text, key="perplexity", value=_perplexity),
    Measure("Δ loss", "Loss minus the baseline's on the same tokens, nats per token",
            signed, key="loss_change", compared="loss", is_difference=True,
            value=_value_at("comparison", "loss", "difference")),
    *map(_loss_at, CONTEXTS),
    Measure("cached loss (perplexity)", "Loss of the last tokens, decoded one by one from the cache, nats per token",
            with_perplexity, key="cached_loss", compared="decoded_loss", on_terminal=False,
            value=_value_at("results", "loss", "cached", "decoded_loss")),
    Measure("KL", "Mean KL divergence KL(baseline ‖ row) of next-token predictions, nats per token",
            _decimals(4), key="kl", value=_value_at("results", "loss", "divergence", "kl")),
    *(Measure(f"KL, p{share}", f"{share}th percentile of the KL divergence over tokens, nats",
              _decimals(3), key=key, value=_value_at("results", "loss", "divergence", key), on_terminal=False)
      for share, key in (("99", "kl_99"), ("99.9", "kl_99_9"))),
    Measure("top-1", "Share of positions where the row's most likely token is the baseline's",
            share, key="top1_agreement", value=_value_at("results", "loss", "divergence", "top1_agreement")),
    Measure("memorized", "Share of tokens whose baseline loss is below 0.1 nats; they hide damage to attention",
            share, key="memorised", value=_memorized("share"), on_terminal=False),
    Measure("loss, not memorized (perplexity)", "Loss of tokens that the baseline has not memorized, nats per token",
            with_perplexity, key="loss_of_others", compared="loss_of_others", on_terminal=False,
            value=_memorized("loss_of_others")),
    Measure("recall", "Share of planted keys returned with all digits right",
            share, key="recall", value=_value_at("results", "recall", "accuracy"), compared="recall",
            is_share=True),
    Measure("needle", "Share of needles found over all lengths and depths",
            share, key="needle", value=_value_at("results", "needle", "accuracy"), compared="needle",
            is_share=True),
)
# fmt: on


def _lm_eval_columns(report: Report) -> list[Measure]:
    """Build a column of the first metric of every lm-eval task."""
    firsts: dict[str, str] = {}
    for row in report["rows"]:
        for task, result in (row.get("results") or {}).items():
            for metric in (result.get("metrics") or {}) if task.startswith("lm-eval:") else ():
                firsts.setdefault(task, metric)
    return [
        Measure(
            f"{task.removeprefix('lm-eval:')} {metric}",
            f"lm-eval task {task.removeprefix('lm-eval:')}, metric {metric}, ± standard error",
            lambda value: decimal(value, 4) if isinstance(value, int | float) else str(value),
            key=f"{task}.{metric}",
            value=_value_at("results", task, "metrics", metric, "value"),
            error=("results", task, "metrics", metric, "stderr"),
        )
        for task, metric in firsts.items()
    ]


def _headline_columns(report: Report) -> list[Measure]:
    """Build the columns of tasks whose results define a headline, see `surgery.eval.session.Task.run`."""
    columns_by_key = {
        name: result["headline"]
        for row in report["rows"]
        for name, result in (row.get("results") or {}).items()
        if isinstance(result, dict) and "headline" in result
    }
    return [
        Measure(
            column.get("title", name),
            column.get("about", name),
            share if column.get("share") else lambda value: decimal(value, 4),
            key=name,
            value=_value_at("results", name, "headline", "value"),
            compared=name,
            is_share=bool(column.get("share")),
        )
        for name, column in columns_by_key.items()
    ]
