"""``surgery config``: list and print the settings files and recipes that ship."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Annotated

import typer

from surgery.cli.options import flag
from surgery.common.errors import SurgeryError
from surgery.common.setting import Setting, did_you_mean, settings_of
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

    Raises SurgeryError: the name is unknown.
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


WIDTH = 118


def settings_page(cls: type, of: str) -> str:
    """Render the settings file.

    Args:
        cls: a settings class.
        of: command or target that it configures, such as "`surgery eval`".
    """
    sections: dict[str, list[Setting]] = {}
    for each in settings_of(cls).values():
        sections.setdefault(each.info.section, []).append(each)
    lines = _comment(f"Every setting of {of}, with its default. Use it with --config; flags win over it.")
    for section, settings in sections.items():
        lines += ["", f"## {section}"]
        for each in settings:
            lines += [*_comment(_about(each)), _line(each)]
    return "\n".join(lines) + "\n"


def _about(setting: Setting) -> str:
    info, choices = setting.info, ", ".join(map(str, setting.choices))
    parts = [info.help, choices and f"One of {choices}." if not setting.many else choices and f"Of {choices}."]
    if setting.optional and setting.default is None and info.unset:
        parts.append(f"null: {info.unset}.")
    return " ".join(part for part in (*parts, info.more) if part)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _line(setting: Setting) -> str:
    import yaml

    value = list(setting.default) if isinstance(setting.default, tuple) else setting.default
    value_text = yaml.safe_dump(value, default_flow_style=True, width=10 * WIDTH).removesuffix("...\n").rstrip()
    return f"{setting.name}: {value_text}"
