"""Generate docs/reference.md from the code: commands, all settings of targets and commands, public functions.

`python tools/reference.py` writes it; tests/test_docs.py checks that it is current.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import typer

import surgery
from surgery.calibration.settings import ConversionSettings
from surgery.cli.program import app
from surgery.common.setting import Setting, settings_of
from surgery.evaluation.settings import EvalSettings
from surgery.heads.settings import HeadSettings
from surgery.planning.settings import PlanSettings
from surgery.structures.registry import SLICE, TARGETS
from surgery.training.settings import HealSettings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
HEAD = """# Reference

Generated from the code by `python tools/reference.py`. Every setting has one name: `kv_ratio` in a file and in Python
is `--kv-ratio` on the command line. `surgery config NAME` prints the settings of a target or command as a file to edit.
"""
FUNCTIONS = ("inspect", "plan", "convert", "slice", "heal", "evaluate", "score_heads", "accelerate", "decelerate")
FUNCTIONS += ("register_structure", "register_family", "register_scorer", "register_task", "register_method")


def page() -> str:
    """Return the whole page."""
    parts = [HEAD, "## Commands\n", _verbs(), "## Settings\n"]
    common = settings_of(ConversionSettings)
    parts += ["### Settings of every conversion\n", _table(common)]
    for target in TARGETS.working().values():
        if target.fixed or not target.home.startswith("surgery."):
            continue  # an alias, or a target of a plugin
        own = {name: each for name, each in settings_of(target.settings_class).items() if each != common.get(name)}
        parts += [f"### `convert --to {target.name}`\n", _table(own)]
    verbs = {"plan": PlanSettings, "slice": SLICE.settings_class, "heads": HeadSettings}
    for name, cls in (verbs | {"eval": EvalSettings, "heal": HealSettings}).items():
        own = {key: each for key, each in settings_of(cls).items() if each != common.get(key)}
        parts += [f"### `{name}`\n", _table(own)]
    parts += ["## Functions\n", *(_function(name) for name in FUNCTIONS)]
    return "\n".join(parts)


def _verbs() -> str:
    rows = ["| command | |", "|---|---|"]

    def add(command, path: tuple[str, ...]) -> None:
        if hasattr(command, "commands"):
            for name, each in command.commands.items():
                add(each, (*path, name))
        else:
            rows.append(f"| `{' '.join(path)}` | {_line(inspect.cleandoc(command.help).partition(chr(10) * 2)[0])} |")

    add(typer.main.get_command(app), ("surgery",))
    return "\n".join(rows) + "\n"


def _table(settings: dict[str, Setting]) -> str:
    rows = ["| setting | default | |", "|---|---|---|"]
    for name, each in settings.items():
        choices = f" One of {', '.join(f'`{choice}`' for choice in each.listed)}." if each.listed else ""
        rows.append(f"| `{name}` | {_default(each)} | {_line(f'{each.info.help}{choices} {each.info.more}')} |")
    return "\n".join(rows) + "\n"


def _default(setting: Setting) -> str:
    default = setting.default
    if default is None:
        return _line(setting.info.unset) or "-"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    each = default if isinstance(default, tuple) else (default,)
    return _line(", ".join(f"`{one}`" for one in each if one != "")) or "-"


def _function(name: str) -> str:
    function = getattr(surgery, name)
    signature = f"surgery.{name}{inspect.signature(function)}"
    text = inspect.getdoc(function)
    return (
        f"### `surgery.{name}`\n\n```text\n{textwrap.fill(signature, 100, subsequent_indent='    ')}\n\n{text}\n```\n"
    )


def _line(text: str) -> str:
    """Escape a text for a table cell."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
