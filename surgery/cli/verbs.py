"""What all verbs share: --quiet, help without types of flags, suggestions for the verbs of a group."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error; only errors.")]


class _PlainFlags:
    """Help of flags: no type, as they take no value, and one name, as two would not fit eighty columns."""

    def get_params(self, ctx) -> list:
        found = super().get_params(ctx)
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found

    def format_help(self, ctx, formatter) -> None:
        options = [each for each in self.get_params(ctx) if each.param_type_name == "option"]
        names = [(each, each.opts, each.secondary_opts) for each in options]
        for each, flags, _ in names:
            long = [flag for flag in flags if flag.startswith("--")]
            each.opts, each.secondary_opts = [flag for flag in flags if flag not in long[1:]], []
        try:
            super().format_help(ctx, formatter)
        finally:
            for each, flags, opposite in names:
                each.opts, each.secondary_opts = flags, opposite


class Verb(_PlainFlags, TyperCommand):
    """A verb."""


class Verbs(_PlainFlags, TyperGroup):
    """The verbs of a group."""


class VerbsWithDefault(Verbs):
    """``surgery heads CKPT`` is ``surgery heads score CKPT``; a verb that is nearly one of the group is a mistake."""

    default = "score"

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help" and not self._misspelt(args[0]):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def _misspelt(self, word: str) -> bool:
        return bool(get_close_matches(word, self.commands)) and not Path(word).exists()


def equip(app: typer.Typer) -> None:
    """Gives every verb of an app what all verbs share."""
    for verb in app.registered_commands:
        verb.cls, verb.callback = Verb, _quietly(verb.callback)
    for group in app.registered_groups:
        equip(group.typer_instance)


def _quietly(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with --quiet."""

    @wraps(verb)
    def called(quiet: bool, **values: Any) -> None:
        if quiet:
            be_quiet()
        verb(**values)

    hints = get_type_hints(verb, include_extras=True)
    parameters = [each.replace(annotation=hints[each.name]) for each in inspect.signature(verb).parameters.values()]
    quiet = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=QuietOption)
    called.__signature__ = inspect.Signature([*parameters, quiet])
    called.__annotations__ = {each.name: each.annotation for each in (*parameters, quiet)}
    return called


def be_quiet() -> None:
    """No bars and notes from here on: ours, and by the environment those of other packages and of processes."""
    from surgery.common.progress import Progress

    Progress.quiet = True
    os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
