"""Options and help that commands share: --quiet, --verbose, --help and --help-all, removed commands and options."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from surgery.cli.options import ADVANCED
from surgery.common.errors import SurgeryError
from surgery.common.removed import removal
from surgery.common.standard_output import printing

HELP_ALL = "help_all"


def _show_all(ctx: typer.Context, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


HelpAllOption = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show every option and exit.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error; only errors.")]


VERBOSE_OPTION: dict[str, Any] = {
    "verbose": (
        False,
        Annotated[
            bool, typer.Option("--verbose", "-v", help="Print lines with times and memory instead of progress bars.")
        ],
    )
}
"""Option of long commands: name, default and annotation."""

LONG = {("convert",), ("slice",), ("heal",), ("eval",), ("plan",), ("run",), ("verify",), ("demo",), ("heads",)}
"""Long-running commands with phases, as tuples of command words."""


class _CompactHelp:
    """Compact help that fits 80 columns: no types and no aliases of flags, and defaults in brackets.

    Attributes:
        more: last line of a help that hides advanced options; {} is their number.
    """

    more = "Options hidden here: {}; `--help-all` shows them."

    def get_params(self, ctx) -> list:
        params = super().get_params(ctx)
        for each in params:
            if each.param_type_name == "argument":
                # Newer versions of typer add the type in brackets, and braces in the usage line.
                each.display_type_rich, each.get_usage_pieces = _return_none, _name_of(each)
            if getattr(each, "is_flag", False):
                each.metavar = ""
            elif getattr(each, "show_default", False) and each.default is not None and not each.required:
                each.help, each.show_default = f"{each.help} [{each.default}]", False
        return params

    def format_help(self, ctx, formatter) -> None:
        options = [each for each in self.get_params(ctx) if each.param_type_name == "option"]
        advanced = () if ctx.meta.get(HELP_ALL) else getattr(self.callback, ADVANCED, ())
        hidden, epilog = [each for each in options if each.name in advanced and not each.hidden], self.epilog
        if hidden:
            self.epilog = self.more.format(len(hidden))
        names = [(each, each.opts, each.secondary_opts) for each in options]
        for each, flags, _ in names:
            long = [flag for flag in flags if flag.startswith("--")]
            each.opts, each.secondary_opts = [flag for flag in flags if flag not in long[1:]], []
        for each in hidden:
            each.hidden = True
        try:
            with printing():
                super().format_help(ctx, formatter)
        finally:
            self.epilog = epilog
            for each in hidden:
                each.hidden = False
            for each, flags, opposite in names:
                each.opts, each.secondary_opts = flags, opposite


def _return_none(ctx: Any) -> None:
    """Return None, to hide a part of the help."""


def _name_of(argument: Any) -> Callable[[Any], list[str]]:
    name = argument.metavar or argument.name.upper()
    return lambda ctx: [name if argument.required else f"[{name}]"]


class SurgeryCommand(_CompactHelp, TyperCommand):
    """Command with compact help and clear errors for removed options."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        """Raise a SurgeryError for options and subcommands that were removed."""
        _refuse_removed_command(ctx, args)
        flags = {flag for each in self.params for flag in (*each.opts, *each.secondary_opts)}
        for flag in (arg.split("=", 1)[0] for arg in args):
            if flag.startswith("--") and flag not in flags:
                name = flag.removeprefix("--no-").strip("-").replace("-", "_")
                if notice := removal(name) or removal(f"{ctx.info_name} {name}"):
                    raise SurgeryError(f"{flag} {notice}")
        return super().parse_args(ctx, args)


class CommandGroup(_CompactHelp, TyperGroup):
    """Command group with compact help and clear errors for removed commands."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        """Raise a SurgeryError for commands that were removed."""
        _refuse_removed_command(ctx, args)
        return super().parse_args(ctx, args)


def _refuse_removed_command(ctx: Any, args: list[str]) -> None:
    name = f"{ctx.info_name if ctx.parent else 'surgery'} {args[0]}" if args else ""
    if notice := removal(name):
        raise SurgeryError(f"{name} {notice}")


def equip(app: typer.Typer, *group: str) -> None:
    """Add the shared options to every command of an app, and --verbose to long-running commands."""
    for command in app.registered_commands:
        name = command.name or command.callback.__name__.strip("_")
        command.cls = command.cls if issubclass(command.cls or TyperCommand, SurgeryCommand) else SurgeryCommand
        command.help = _with_example_lines(command.help or inspect.getdoc(command.callback) or "")
        command.callback = _shared(command.callback, VERBOSE_OPTION if (*group, name) in LONG else {})
    for each in app.registered_groups:
        equip(each.typer_instance, *group, each.name or each.typer_instance.info.name)


def _with_example_lines(text: str) -> str:
    """Put the examples of a command's help on lines of their own, without Markdown paragraphs or a code box."""
    intro, mark, examples = re.split(r"(Examples?:)\n\n", text, maxsplit=1) if "\nExample" in text else (text, "", "")
    return intro + "\\\n".join([mark, *(line.strip() for line in examples.splitlines() if line.strip())])


def _shared(function: Callable[..., None], verbose_option: dict[str, Any]) -> Callable[..., None]:
    """Wrap a command function with --quiet, --help-all, and --verbose if given."""

    @wraps(function)
    def called(quiet: bool, help_all: bool, **values: Any) -> None:
        from surgery.common.progress import QUIET, VERBOSE

        # `surgery inspect` has a --verbose of its own.
        verbose = VERBOSE if verbose_option and values.pop("verbose") else {}
        with environment(**(QUIET if quiet else {}), **verbose):
            function(**values)

    hints = get_type_hints(function, include_extras=True)
    parameters = [each.replace(annotation=hints[each.name]) for each in inspect.signature(function).parameters.values()]
    shared = {**verbose_option, "quiet": (False, QuietOption), HELP_ALL: (False, HelpAllOption)}
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
        for name, (default, option) in shared.items()
    ]
    called.__signature__ = inspect.Signature(parameters)
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    setattr(called, ADVANCED, [each.name for each in parameters if ADVANCED in get_args(each.annotation)])
    return called


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for the block and restore their previous values at its end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
