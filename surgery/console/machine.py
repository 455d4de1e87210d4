"""Output of `surgery doctor` without a checkpoint: facts on the machine for bug reports."""

from __future__ import annotations

from surgery.common.human import size
from surgery.common.machine import machine_facts
from surgery.common.tables.table import Column
from surgery.console.page import make_table, new_page, print_json
from surgery.version import __version__


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
