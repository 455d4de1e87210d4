"""The headline table of a report, defined once for the terminal, the page and the CSV file.

A report is the plain dict that `surgery eval` writes as JSON. Anything may be missing from it: tasks that were not run,
a baseline, a comparison. A column knows where its number is, how people read it, and which direction is better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from surgery.common.human import decimal, share
from surgery.eval.report.document import dig

Row = dict[str, Any]
Report = dict[str, Any]
Value = float | str | None

NONE = "-"
MINUS = "\u2212"


@dataclass(frozen=True)
class Column:
    """One column of the headline table.

    Attributes:
        key: stable name, for machines.
        title: for people, short.
        about: the title in words, with the unit.
        value: the exact number (or text) of a row of a report; None where there is none.
        form: how a value other than None is shown.
        better: which direction is good; None where there is no such thing.
        compared: the key in the row's `comparison` whose difference belongs to this column; None for none.
        is_difference: whether the value is that difference itself, so that only its interval is left to tell.
        is_share: whether the difference is one of shares, shown in percentage points.
        on_terminal: whether a terminal, which is narrow, shows it too.
    """

    key: str
    title: str
    about: str
    value: Callable[[Row, Report], Value]
    form: Callable[[Any], str] = str
    better: Literal["low", "high"] | None = None
    compared: str | None = None
    is_difference: bool = False
    is_share: bool = False
    on_terminal: bool = True

    def text(self, row: Row, report: Report) -> str:
        """The value as people read it, a dash where there is none."""
        value = self.value(row, report)
        return NONE if value is None else self.form(value)

    def change(self, row: Row) -> dict[str, float] | None:
        """`difference`, `low`, `high` of this row minus the baseline (95 % interval); None where not compared."""
        return dig(row, "comparison", self.compared) if self.compared else None

    def change_text(self, row: Row) -> str | None:
        """The change and its interval, or the interval alone if the value is the change; None where not compared."""
        change = self.change(row)
        if change is None:
            return None
        return (
            interval(change, percent=self.is_share or self.compared in SHARES, difference=not self.is_difference)
            or None
        )

    def verdict(self, row: Row) -> Literal["better", "worse"] | None:
        """Whether the interval of the change lies on one side of zero, and on which."""
        change = self.change(row)
        if change is None or change.get("low") is None or change.get("high") is None or self.better is None:
            return None
        if change["low"] <= 0 <= change["high"]:
            return None
        return "better" if (change["low"] > 0) == (self.better == "high") else "worse"


SHARES = frozenset({"recall", "needle", "ruler"})
"""Comparisons of shares of one; the others are in nats."""


def columns(report: Report) -> list[Column]:
    """The headline columns for which at least one row has a value, in order."""
    every = [*HEADLINE, *_lm_eval_columns(report), *_headline_columns(report)]
    return [column for column in every if any(column.value(row, report) is not None for row in report["rows"])]


def signed(value: float, digits: int = 4) -> str:
    """A difference with its sign, a true minus: ``+0.0600``, ``−0.0012``."""
    text = f"{abs(value):.{digits}f}"
    return text if float(text) == 0 else ("+" if value > 0 else MINUS) + text


def signed_points(value: float) -> str:
    """A difference of two shares in percentage points, without the unit: ``−4.2``."""
    return signed(100 * value, 1)


def interval(change: dict[str, float], *, percent: bool, difference: bool = True) -> str:
    """A change with its 95 % interval: ``+0.0600 [+0.0500, +0.0700]``; of shares in percentage points."""
    form = signed_points if percent else signed
    low, high = change.get("low"), change.get("high")
    parts = [form(change["difference"])] if difference else []
    if low is not None and high is not None:
        parts.append(f"[{form(low)}, {form(high)}]")
    return " ".join(parts)


def scalars(row: Row) -> dict[str, float]:
    """Everything measured of a row that is one number but no headline: dotted key to exact value, in a fixed order.

    By source of the text, by needle length, by RULER task and length, by lm-eval metric, by context and batch.
    """
    results = row.get("results") or {}
    found: dict[str, float | None] = {}
    for key in ("perplexity", "bits_per_byte"):
        found[f"loss.{key}"] = dig(results, "loss", key)
    for source, part in (dig(results, "loss", "by_source") or {}).items():
        for key in ("loss", "bits_per_byte", "tokens"):
            found[f"loss.{source}.{key}"] = part.get(key)
    for part in dig(results, "loss", "by_position") or []:
        found[f"loss.positions_{part['start']}_{part['end']}"] = part.get("loss")
    needle = results.get("needle") or {}
    for length, cells in zip(needle.get("lengths", []), needle.get("grid", []), strict=False):
        found[f"needle.{length}"] = sum(cells) / len(cells) if cells else None
    for length, part in (dig(results, "ruler", "lengths") or {}).items():
        for task, score in (part.get("tasks") or {}).items():
            found[f"ruler.{length}.{task}"] = score.get("score")
        found[f"ruler.{length}.average"] = part.get("average")
    for lag, part in (dig(results, "repeat", "lags") or {}).items():
        for key in ("first", "second"):
            found[f"repeat.{lag}.{key}"] = part.get(key)
    for key in ("of", "same"):
        found[f"match.{key}"] = dig(results, "match", key)
    for task in lm_eval_tasks(row):
        for metric, measured in (results[task].get("metrics") or {}).items():
            found[f"{task}.{metric}"] = measured.get("value")
            found[f"{task}.{metric}_stderr"] = measured.get("stderr")
    for part in dig(results, "memory", "contexts") or []:
        for key in ("cache_bytes", "peak_prefill_bytes", "peak_decode_bytes"):
            found[f"memory.{part['context']}.{key}"] = part.get(key)
    for part in dig(results, "speed", "points") or []:
        for key in ("prefill_tokens_per_second", "decode_tokens_per_second"):
            found[f"speed.{part['context']}.batch_{part['batch']}.{key}"] = part.get(key)
    return {key: value for key, value in found.items() if isinstance(value, int | float)}


def lm_eval_tasks(row: Row) -> list[str]:
    """The keys of a row's results that lm-eval measured."""
    return [key for key in row.get("results") or {} if key.startswith("lm-eval:")]


def described(row: Row) -> str:
    """What a row is, in a few words: ``baseline``, ``mla, fisher, healed``, ``quantized-kv, bits 4, group 32``."""
    variant, conversion = row.get("variant"), row.get("conversion")
    if variant:
        rest = [f"{key.replace('_', ' ')} {value}" for key, value in variant.items() if key != "kind"]
        return ", ".join([str(variant.get("kind", "variant")), *rest])
    if conversion:
        parts = [conversion.get("to"), conversion.get("method"), "healed" if conversion.get("healing") else None]
        return ", ".join(str(part) for part in parts if part)
    return str(row.get("role", ""))


def _at(*path: str) -> Callable[[Row, Report], Value]:
    return lambda row, report: dig(row, *path)


def _digits(count: int) -> Callable[[float], str]:
    return lambda value: decimal(value, count)


HEADLINE: tuple[Column, ...] = (
    Column("name", "row", "Name of the row", _at("name")),
    Column(
        "kv_bytes_per_token",
        "KV B/token",
        "Bytes of KV cache held, measured live, for each token at the report's context",
        _at("kv", "bytes_per_token"),
        lambda value: f"{value:,.0f}",
        "low",
    ),
    Column("kv_ratio", "KV share", "KV bytes relative to the baseline's", _at("kv", "ratio"), share, "low"),
    Column(
        "kv_peak",
        "KV peak",
        "The most bytes that keys and values took, the prompt read in one pass, relative to the baseline's",
        _at("kv", "peak_ratio"),
        share,
        "low",
    ),
    Column(
        "kv_footprint",
        "KV footprint",
        "Share of full causal attention that was computed while the prompt was read and tokens decoded",
        _at("kv", "footprint"),
        share,
        "low",
    ),
    Column("loss", "loss", "Mean cross-entropy, nats a token", _at("results", "loss", "loss"), _digits(4), "low"),
    Column(
        "loss_change",
        "Δ loss",
        "Loss minus the baseline's on the same tokens, nats a token",
        _at("comparison", "loss", "difference"),
        signed,
        "low",
        compared="loss",
        is_difference=True,
    ),
    Column(
        "cached_loss",
        "cached loss",
        "Loss of the last tokens, decoded one by one through the live KV cache, nats a token",
        _at("results", "loss", "cached", "loss"),
        _digits(4),
        "low",
        compared="cached_loss",
    ),
    Column(
        "kl",
        "KL",
        "Kullback-Leibler divergence KL(baseline ‖ row) of next-token predictions, mean, nats a token",
        _at("results", "loss", "divergence", "kl"),
        _digits(4),
        "low",
    ),
    Column(
        "top1_agreement",
        "top-1",
        "Share of positions where the row's most likely token is the baseline's",
        _at("results", "loss", "divergence", "top1_agreement"),
        share,
        "high",
    ),
    Column(
        "memorised",
        "by heart",
        "Share of tokens that the baseline predicts at less than 0.1 nats: they hide damage to attention",
        lambda row, report: dig(row, "results", "loss", "memorised", "share") if report.get("baseline") else None,
        share,
        on_terminal=False,
    ),
    Column(
        "loss_of_others",
        "loss, others",
        "Loss of the tokens that the baseline does not know by heart, nats a token",
        lambda row, report: (
            dig(row, "results", "loss", "memorised", "loss_of_others") if report.get("baseline") else None
        ),
        _digits(4),
        "low",
        compared="loss_of_others",
        on_terminal=False,
    ),
    Column(
        "repeat",
        "repeat",
        "Loss of a span of text that came before, mean over the lags, nats a token",
        _at("results", "repeat", "loss"),
        _digits(4),
        "low",
        compared="repeat",
    ),
    Column(
        "match",
        "match",
        "Mean number of tokens that are written greedily as the baseline writes them",
        _at("results", "match", "tokens"),
        _digits(1),
        "high",
    ),
    Column(
        "recall",
        "recall",
        "Share of planted keys given back, all digits right",
        _at("results", "recall", "accuracy"),
        share,
        "high",
        compared="recall",
    ),
    Column(
        "needle",
        "needle",
        "Share of needles found over all lengths and depths",
        _at("results", "needle", "accuracy"),
        share,
        "high",
        compared="needle",
    ),
    Column(
        "ruler",
        "RULER-style",
        "Mean score of the RULER-style tasks over all lengths",
        _at("results", "ruler", "average"),
        share,
        "high",
        compared="ruler",
    ),
    Column(
        "ruler_able",
        "RULER-style, able",
        "Mean score of the RULER-style tasks and lengths in which the baseline scores enough to lose something",
        _at("results", "ruler", "able", "average"),
        share,
        "high",
    ),
    Column(
        "kernels",
        "kernels",
        "What reads the layers' caches when the project's kernels are put under the model, or why nothing does",
        lambda row, report: _kernels(dig(row, "results", "kernels")),
    ),
    Column(
        "kernel_error",
        "kernel error",
        "Relative root mean square error of logits with kernels, against the model's own code",
        _at("results", "kernels", "logit_error"),
        lambda value: f"{value:.1e}",
        "low",
    ),
    Column(
        "kernel_loss_change",
        "Δ loss, kernels",
        "Largest difference that kernels make to the loss of a token that is decoded through the cache, nats",
        _at("results", "kernels", "largest_difference"),
        lambda value: f"{value:.1e}",
        "low",
    ),
)


def _kernels(result: dict[str, Any] | None) -> str | None:
    if result is None:
        return None
    return result["refused"] or ", ".join(f"{layers} x {name}" for name, layers in result["operations"].items())


def _lm_eval_columns(report: Report) -> list[Column]:
    """The first metric of every lm-eval task of the report."""
    firsts: dict[str, str] = {}
    for row in report["rows"]:
        for task in lm_eval_tasks(row):
            for metric in row["results"][task].get("metrics") or {}:
                firsts.setdefault(task, metric)
    return [
        Column(
            f"{task}.{metric}",
            f"{task.removeprefix('lm-eval:')} {metric}",
            f"lm-eval task {task.removeprefix('lm-eval:')}, metric {metric}",
            _at("results", task, "metrics", metric, "value"),
            lambda value: decimal(value, 4) if isinstance(value, int | float) else str(value),
        )
        for task, metric in firsts.items()
    ]


def _headline_columns(report: Report) -> list[Column]:
    """Of tasks whose results say themselves what their number is: `surgery.eval.session.Task.run`."""
    told = {
        name: result["headline"]
        for row in report["rows"]
        for name, result in (row.get("results") or {}).items()
        if isinstance(result, dict) and "headline" in result
    }
    return [
        Column(
            name,
            said.get("title", name),
            said.get("about", name),
            _at("results", name, "headline", "value"),
            share if said.get("share") else lambda value: decimal(value, 4),
            better=said.get("better"),
            compared=name,
            is_share=bool(said.get("share")),
        )
        for name, said in told.items()
    ]
