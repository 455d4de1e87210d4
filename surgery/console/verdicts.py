"""One-sentence verdicts on a conversion or healing, the engines that load a result, and suggested next commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from surgery.common.human import cost, shares_at
from surgery.console.page import plain
from surgery.engines.verdict import NOT_TRIED, OPEN, REFUSED, loads, ran, ruin_warning


def of_conversion(report: dict[str, Any]) -> str:
    """Return the verdict on a `surgery_report.json`."""
    first, last, kv = report["ladder"][0], report["ladder"][-1], report["kv"]
    kv_part = kept_bytes(kv)
    where = engines_sentence(report["target"]["engines"])
    if first["loss"] is None:
        return f"{kv_part}; loss not measured; {where}"
    predicted = report["target"].get("predicted")
    planned = f"; the plan expected {cost(predicted['loss_increase'])}" if predicted else ""
    change = cost(last["loss"] - first["loss"], (first["recall"], last["recall"]))
    if " at " in kv_part and (length := report["calibration"].get("length")):
        change += f", measured at {length:,} tokens"
    return f"{kv_part} for {change}{planned}; {where}"


def kept_bytes(kv: Mapping[str, Any]) -> str:
    """Format the share of the KV bytes of a report's ``kv``, by context length if it depends on the length.

    Residual windows and sinks weigh most in short texts, and the measured share is of a short text.
    """
    share, *lengths = shares_at(kv.get("ratio_at"), kv["ratio"]).split(" at ", 1)
    return " at ".join([f"{share} of the KV bytes", *lengths])


def of_healing(healing: dict[str, Any]) -> str:
    """Return the verdict on a healing, from the ``healing`` of a report."""
    rows = {row["name"]: row for row in healing["table"] or []}
    if "healed" not in rows:
        return "loss and recall were not measured after healing"
    healed, source = rows["healed"], rows.get("source")
    before = rows.get("converted") or next((row for row in healing["table"] if row is not source), healed)
    gained = (
        f"healing changed the loss by {cost(healed['loss'] - before['loss'], (before['recall'], healed['recall']))}"
    )
    return gained if source is None else f"{gained}; now {cost(healed['loss'] - source['loss'])} relative to the source"


def engines_sentence(engines: Mapping[str, Any]) -> str:
    """Describe the engines that load the result, and those that refuse it or were not tried, by the report's table."""
    verdicts = {engine: verdict for engine, verdict in engines.items() if not isinstance(verdict, str)}
    taking = [
        engine if ran(verdict) else f"{engine} (by its own check, not run)"
        for engine, verdict in verdicts.items()
        if loads(verdict)
    ]
    sentence = f"loads in {', '.join(taking)}" if taking else "no engine is known to load it"
    for words, status in (("not tried in", NOT_TRIED), ("depends on calibration for", OPEN), ("refused by", REFUSED)):
        if others := [engine for engine, verdict in verdicts.items() if verdict["status"] == status]:
            sentence += f"; {words} {', '.join(others)}"
    return sentence


def show_ruin(page: Console, formats: Sequence[str]) -> None:
    """Print a warning on weight or cache formats that ruin the checkpoint, if any."""
    if formats:
        page.print(f"[bold yellow]{plain(ruin_warning(formats))}[/bold yellow]", soft_wrap=True)


def show_next(page: Console, commands: Iterable[str]) -> None:
    """Print commands below each other, the first one after "Next:"."""
    for number, command in enumerate(commands):
        page.print(f"{'Next: ' if number == 0 else '      '}{plain(command)}", soft_wrap=True, highlight=False)
