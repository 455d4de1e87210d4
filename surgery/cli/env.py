"""``surgery env``: what a report of a bug needs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from surgery.cli.options import JsonOption
from surgery.common.environment import gpus, machine
from surgery.common.human import size


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command()(env)


def env(
    gpu: Annotated[bool, typer.Option("--gpu", help="Also the GPUs, for which torch is loaded.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print what a report of a bug needs: versions, system, processor, memory, threads. No paths, no tokens.

    Examples:

        surgery env

        surgery env --gpu --json
    """
    found = machine() | ({"gpu": gpus()} if gpu else {})
    if as_json:
        from surgery.console.page import print_json

        print_json(found)
        return
    for name, value in _lines(found):
        print(f"{name}: {value}")


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values for people."""
    cpu, memory = found["cpu"], found["memory"]
    usable = f", {cpu['usable_cores']} usable" if cpu["usable_cores"] not in (None, cpu["cores"]) else ""
    total = "unknown" if memory["total_bytes"] is None else size(memory["total_bytes"])
    limit = f", limited to {size(memory['limit_bytes'])}" if memory["limit_bytes"] else ""
    lines = [("surgery", found["surgery"]), ("python", found["python"]), *found["packages"].items()]
    lines += [("platform", found["platform"]), ("cpu", f"{cpu['name']}, {cpu['cores']} cores{usable}")]
    lines += [("memory", total + limit)]
    lines += [
        (name, said["value"] + (" (set by surgery)" if said["by_surgery"] else ""))
        for name, said in found["threads"].items()
    ]
    if "gpu" in found:
        lines += _gpu_lines(found["gpu"])
    return lines


def _gpu_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    if "error" in found:
        return [("gpu", f"torch cannot tell: {found['error']}")]
    if not found["devices"]:
        return [("gpu", "none")]
    shown = [f"{each['name']}, {size(each['memory_bytes'])}, sm {each['capability']}" for each in found["devices"]]
    return [("cuda", found["cuda"]), *(("gpu", each) for each in shown)]
