"""``surgery config``: list and print the settings files and recipes that ship."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from surgery.cli.options import flag
from surgery.common.errors import SurgeryError
from surgery.common.setting import did_you_mean
from surgery.common.settings_page import settings_page
from surgery.common.shipped import Kind, shipped
from surgery.common.standard_output import printing
from surgery.evaluation.settings import EvalSettings
from surgery.heads.settings import HeadSettings
from surgery.planning.settings import PlanSettings
from surgery.structures.registry import SLICE, TARGETS
from surgery.training.settings import HealSettings


def config(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="mla, gqa, lowrank … plan, slice, heads, heal, eval. [lists all]"),
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print the list, or the settings, as JSON on standard output.")] = False,
) -> None:
    """Print a settings file with defaults and help of all settings, or a shipped settings file or recipe.

    Without a name: list the shipped settings files, which `--config` accepts by name.

    Examples:

        surgery config

        surgery config mla > my.yaml

        surgery config testbed-mla > recipe.yaml
    """
    if name is None:
        show_shipped("configs", as_json=as_json)
        return
    page = config_page(name)
    if as_json:
        import yaml

        from surgery.console.page import print_json

        print_json(yaml.safe_load(page))
        return
    with printing():
        print(page, end="")


def config_page(name: str) -> str:
    """Return the generated settings file of a target or command, or a shipped settings file or recipe.

    Raises:
        SurgeryError: the name is unknown.
    """
    classes = {
        each.name: (each.settings_class, f"`surgery convert --to {each.name}`") for each in TARGETS.working().values()
    }
    commands = {"plan": PlanSettings, "slice": SLICE.settings_class, "heads": HeadSettings}
    commands |= {"heal": HealSettings, "eval": EvalSettings}
    classes |= {command: (cls, f"`surgery {command}`") for command, cls in commands.items()}
    if name in classes:
        return settings_page(*classes[name])
    hand_written = {each.name: each.path for each in (*shipped("recipes"), *shipped("configs"))}
    if name not in hand_written:
        names = list(dict.fromkeys([*classes, *hand_written]))
        raise SurgeryError(f"unknown settings {name}; choose one of {', '.join(names)}{did_you_mean(name, names)}")
    return hand_written[name].read_text(encoding="utf-8")


def show_shipped(kind: Kind, *, as_json: bool) -> None:
    """Print the names and descriptions of the recipes or settings files that ship."""
    from surgery.console.page import make_table, new_page, print_json
    from surgery.console.verdicts import show_next

    files = shipped(kind)
    if as_json:
        print_json({kind: [{**asdict(each), "path": str(each.path)} for each in files]})
        return
    page = new_page()
    page.print(make_table(["name", ""], [(each.name, each.about) for each in files], header=False))
    usage = "surgery run NAME --dry-run" if kind == "recipes" else "surgery convert CKPT --config NAME --dry-run"
    commands = {usage: "estimates memory, disk and time", "surgery config NAME > my.yaml": "a copy to edit"}
    show_next(page, [f"{command:{len(usage)}}   {why}" for command, why in commands.items()])
