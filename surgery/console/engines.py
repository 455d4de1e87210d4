"""Output of ``surgery doctor`` and ``surgery export``: tables, or with ``as_json`` one JSON object."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Console

from surgery.checkpoint.named_models import name_of
from surgery.common.human import per_token, size
from surgery.common.machine import machine_facts
from surgery.common.tables.table import Column
from surgery.console.page import make_table, new_page, plain, print_json, typed
from surgery.console.verdicts import show_ruin
from surgery.engines.table import ANY
from surgery.engines.verdict import Verdict
from surgery.version import __version__


def show_doctor(diagnosis, *, as_json: bool = False) -> None:
    """Print the engines that load a checkpoint or refuse it (:class:`surgery.engines.table.Diagnosis`)."""
    if as_json:
        print_json(diagnosis.to_dict())
        return
    page = new_page()
    page.print(f"\n[bold]{plain(name_of(diagnosis.path))}[/bold] ({plain(diagnosis.facts.kind)})")
    columns = ["engine", Column("version", align="left"), "", Column("KV cache per token", align="right"), "reason"]
    rows = []
    for verdict in diagnosis.verdicts:
        why = f"{verdict.reason}; {verdict.remedy}" if verdict.remedy else verdict.reason
        rows.append((verdict.engine, verdict.version, verdict.status, _allocation(verdict), why))
    if all(row[3] is None for row in rows):
        columns, rows = [*columns[:3], columns[4]], [(*row[:3], row[4]) for row in rows]
    page.print(make_table(columns, rows))
    show_commands(page, {verdict.engine: verdict.to_dict() for verdict in diagnosis.verdicts})
    show_ruin(page, diagnosis.ruined_by)


def show_export(exported, *, as_json: bool = False) -> None:
    """Print a file that was exported for an engine (:class:`surgery.export.Exported`)."""
    if as_json:
        print_json(exported.to_dict())
        return
    page = new_page()
    page.print(f"{plain(exported.architecture)} in {exported.weights}, {size(exported.bytes)}, {exported.tokenizer}")
    page.print(f"[bold]{plain(exported.path)}[/bold]", soft_wrap=True)
    page.print(plain(exported.command), soft_wrap=True, highlight=False)
    if exported.command_q8_0:
        page.print(f"{plain(exported.command_q8_0)}   about half of the KV bytes", soft_wrap=True, highlight=False)


def show_commands(page: Console, engines: dict, called: str | Path = ANY) -> None:
    """Print the commands that serve a checkpoint; ``called`` is its name in them."""
    names = {f'"{ANY}"': json.dumps(str(called), ensure_ascii=False), ANY: typed(called)}
    for verdict in engines.values():
        if not isinstance(verdict, str) and verdict["command"]:
            command = re.sub(f'"{ANY}"|{ANY}', lambda match: names[match[0]], verdict["command"])
            page.print(f"{plain(verdict['engine'])}: {plain(command)}", soft_wrap=True, highlight=False)


def _allocation(verdict: Verdict) -> str | None:
    """Format the bytes that an engine allocates per token, and per request in addition; None if unknown."""
    if verdict.cache_bytes_per_token is None:
        return None
    once = verdict.cache_bytes_per_request
    return per_token(verdict.cache_bytes_per_token) + (f" + {size(once)} per request" if once else "")


def show_machine(*, gpu: bool, as_json: bool) -> None:
    """Print versions, cores and memory, and with ``gpu`` accelerators, which imports torch; no paths or names."""
    facts = {"surgery": __version__, **machine_facts(gpu=gpu)}
    if as_json:
        print_json(facts)
        return
    memory = f"{size(facts['memory_bytes'])}, {size(facts['memory_available_bytes'])} available"
    rows = [("surgery", facts["surgery"]), ("python", facts["python"]), ("system", facts["system"])]
    rows += [("cores", str(facts["cores"])), ("memory", memory)]
    rows += [*facts["environment"].items(), *facts["packages"].items()]
    for each in facts.get("accelerators", []):
        rows.append((each["name"], f"{size(each['memory_bytes'])}, sm {each['capability']}, CUDA {each['cuda']}"))
    if facts.get("accelerators") == []:
        rows.append(("accelerators", "none"))
    new_page().print(make_table(["", Column("", align="left")], rows, header=False))
