"""The last words of a screen: what something cost in one sentence, where it loads, and the commands that come next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from surgery.common.human import cost, shares_at
from surgery.console.page import plain
from surgery.engines.verdict import NOT_TRIED, OPEN, REFUSED, loads, ran, told_ruin


def of_conversion(report: dict[str, Any]) -> str:
    """Return the verdict on a `surgery_report.json`."""
    first, last, kv = report["ladder"][0], report["ladder"][-1], report["kv"]
    kv_part = kept_bytes(kv)
    where = where_it_loads(report["target"]["engines"])
    if first["loss"] is None:
        return f"{kv_part}; what that cost was not measured; {where}"
    predicted = report["target"].get("predicted")
    planned = f"; the plan expected {cost(predicted['loss_increase'])}" if predicted else ""
    change = cost(last["loss"] - first["loss"], (first["recall"], last["recall"]))
    return f"{kv_part} for {change}{planned}; {where}"


def kept_bytes(kv: Mapping[str, Any]) -> str:
    """Return the share of the KV bytes of a report's ``kv``, at the lengths that it depends on.

    Windows and tokens in full precision count most in short texts, and the share that was measured is of such a one.
    """
    share, *lengths = shares_at(kv.get("ratio_at"), kv["ratio"]).split(" at ", 1)
    return " at ".join([f"{share} of the KV bytes", *lengths])


def of_healing(healing: dict[str, Any]) -> str | None:
    """Return the verdict on a healing that was measured together with its source."""
    rows = {row["name"]: row for row in healing["table"] or []}
    if "healed" not in rows:
        return None
    healed, source = rows["healed"], rows.get("source")
    before = rows.get("converted") or next((row for row in healing["table"] if row is not source), healed)
    gained = f"healing changed {cost(healed['loss'] - before['loss'], (before['recall'], healed['recall']))}"
    return gained if source is None else f"{gained}; now {cost(healed['loss'] - source['loss'])} from the source"


def where_it_loads(engines: Mapping[str, Any]) -> str:
    """Return the engines that load the result, by the report's table, in which all are named."""
    verdicts = {engine: verdict for engine, verdict in engines.items() if not isinstance(verdict, str)}
    taking = [
        engine if ran(verdict) else f"{engine} (by its own check, not run)"
        for engine, verdict in verdicts.items()
        if loads(verdict)
    ]
    sentence = f"loads in {', '.join(taking)}" if taking else "no engine is known to load it"
    for words, status in (("not tried in", NOT_TRIED), ("open in", OPEN), ("refused by", REFUSED)):
        if others := [engine for engine, verdict in verdicts.items() if verdict["status"] == status]:
            sentence += f"; {words} {', '.join(others)}"
    return sentence


def show_ruin(page: Console, formats: Sequence[str]) -> None:
    """Names the formats of weights or cache that a checkpoint does not survive, if any."""
    if formats:
        page.print(f"[bold yellow]{plain(told_ruin(formats))}[/bold yellow]", soft_wrap=True)


def show_next(page: Console, commands: Iterable[str]) -> None:
    """Commands under each other, after one "Next:"."""
    for number, command in enumerate(commands):
        page.print(f"{'Next: ' if number == 0 else '      '}{plain(command)}", soft_wrap=True, highlight=False)
