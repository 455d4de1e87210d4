"""``surgery recipes`` and ``surgery configs``: what ships, and copies of it to change."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.options import JsonOption
from surgery.common.shipped import Kind, copy_shipped, shipped

CopyOption = Annotated[
    str | None, typer.Option("--copy", metavar="NAME", help="Write NAME.yaml into the current folder, to change it.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]


def register(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command()(recipes)
    app.command()(configs)


def recipes(copy: CopyOption = None, overwrite: OverwriteOption = False, as_json: JsonOption = False) -> None:
    """List the recipes that ship, which `surgery run` takes by name.

    Examples:

        surgery recipes

        surgery recipes --copy testbed-mla
    """
    _show("recipes", copy, overwrite, as_json)


def configs(copy: CopyOption = None, overwrite: OverwriteOption = False, as_json: JsonOption = False) -> None:
    """List the settings files that ship, which `--config` takes by name: every setting of a verb, with its default.

    Examples:

        surgery configs

        surgery configs --copy mla-everywhere
    """
    _show("configs", copy, overwrite, as_json)


def _show(kind: Kind, copy: str | None, overwrite: bool, as_json: bool) -> None:
    from surgery.console.page import make_table, new_page, plain, print_json

    if copy is not None:
        path = copy_shipped(copy, kind, Path(), overwrite=overwrite)
        print_json({"path": str(path)}) if as_json else new_page().print(plain(path), soft_wrap=True)
        return
    found = shipped(kind)
    if as_json:
        print_json({kind: [{**asdict(each), "path": str(each.path)} for each in found]})
        return
    new_page().print(make_table(["name", ""], [(each.name, each.about) for each in found], header=False))
