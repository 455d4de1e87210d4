"""Command-line options generated from settings classes, which define names, types, defaults and help once.

A command function has a parameter ``options``, which :func:`with_settings` replaces by one option for every setting.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from surgery.cli.options import ADVANCED, INPUTS, MACHINE, OUTPUT
from surgery.common.errors import SurgeryError
from surgery.common.removed import removal
from surgery.common.setting import Setting, settings_of

LONGEST_METAVAR = 20
VALUES = {int: "N", float: "F", str: "TEXT"}


@dataclass(frozen=True)
class SettingOption:
    """Command-line option and the settings that it sets.

    Attributes:
        key: parameter name of the option.
        settings: setting by target; a command without targets counts as one target.
        targets: number of targets of the command.
    """

    key: str
    settings: Mapping[str, Setting]
    targets: int

    @property
    def first(self) -> Setting:
        return next(iter(self.settings.values()))

    @property
    def flag(self) -> str:
        return _flag(self.key)

    @property
    def old(self) -> dict[str, str]:
        """Deprecated flags, by parameter name."""
        flags = [old for each in self.settings.values() for old in each.info.old]
        flags += [_flag(each.name) for each in self.settings.values() if each.name != self.key]
        return {flag.strip("-").replace("-", "_"): flag for flag in flags}

    @property
    def panel(self) -> str:
        """Panel of the help: the setting's section, or the target if only one of several has the setting."""
        if self.targets > 1 and len(self.settings) == 1:
            return f"--to {next(iter(self.settings))}"
        return self.first.info.section

    def parameters(self) -> list[inspect.Parameter]:
        """Return the typer parameters: the option, and a hidden option for each deprecated flag."""
        flag, metavar, kind = self.flag, self.metavar, str | None
        if self.first.info.repeated:
            kind = list[str] | None
        elif self.first.kinds == (bool,):
            flag, metavar, kind = f"{self.flag}/--no-{self.flag.strip('-')}", None, bool | None
        details = {"metavar": metavar, "help": self.help, "rich_help_panel": self.panel}
        options = {self.key: typer.Option(flag, *self.first.info.also, **details)}
        options |= {key: typer.Option(old, metavar=metavar, hidden=True) for key, old in self.old.items()}
        advanced = (ADVANCED,) if all(each.info.advanced for each in self.settings.values()) else ()
        return [_parameter(key, Annotated[(kind, option, *advanced)], None) for key, option in options.items()]

    @property
    def metavar(self) -> str:
        if self.first.info.metavar:
            return self.first.info.metavar
        choices = "|".join(dict.fromkeys(str(word) for each in self.settings.values() for word in each.choices))
        if choices and len(choices) <= LONGEST_METAVAR and not self.first.many:
            return choices
        value = VALUES.get(self.first.kinds[0], "TEXT")
        return ("A,B" if value == "TEXT" else f"{value},…") if self.first.many else "NAME" if choices else value

    @property
    def help(self) -> str:
        """Help text: help, choices and defaults of the settings, with target names where they differ."""
        parts = []
        for text, targets in self._by_target(lambda each: each.info.help):
            for_all = self.targets == 1 or len(self.settings) == 1 or len(targets) == self.targets
            parts.append(text if for_all else f"{text.removesuffix('.')} ({', '.join(targets)}).")
        values = self._by_target(lambda each: ", ".join(map(str, each.choices)))
        if len(values) > 1 or (values and self.metavar != "|".join(map(str, self.first.choices))):
            one_of = "" if len(values) > 1 else "Of " if self.first.many else "One of "
            parts.append(f"{one_of}{_with_targets(values)}.")
        if self.first.info.also:
            parts.append(f"Also {', '.join(self.first.info.also)}.")
        defaults = self._by_target(_default)
        return " ".join(parts) + (f" [{_with_targets(defaults)}]" if defaults else "")

    def _by_target(self, text_of: Callable[[Setting], str]) -> list[tuple[str, list[str]]]:
        targets: dict[str, list[str]] = {}
        for target, each in self.settings.items():
            if text := text_of(each):
                targets.setdefault(text, []).append(target)
        return list(targets.items())


@dataclass(frozen=True)
class OptionValues:
    """Option values of a command line."""

    classes: Mapping[str, type]
    values: tuple[tuple[SettingOption, Any], ...]

    def of(self, cls: type, where: str = "") -> dict[str, Any]:
        """Return the given values of a settings class, by setting name.

        Args:
            cls: settings class.
            where: option that selects the class, such as ``--to mla``, for errors.

        Raises:
            SurgeryError: an option is not a setting of this class, or its value has the wrong type.
        """
        target = next(target for target, each in self.classes.items() if each is cls)
        values = {}
        for option, value in self.values:
            setting = option.settings.get(target)
            if setting is None:
                notice = removal(f"{where.removeprefix('--to ')} {option.flag.strip('-').replace('-', '_')}")
                reason = notice or f"is for {', '.join(option.settings)}; {where} has no such setting"
                raise SurgeryError(f"{option.flag} {reason}")
            values[setting.name] = setting.converted(value, option.flag)
        return {name: value for name, value in values.items() if value is not None}

    def get(self, key: str) -> Any:
        """Return the text of an option; None if it is not set."""
        return next((value for option, value in self.values if option.key == key), None)


def with_settings(function: Callable[..., None], classes: Mapping[str, type]) -> Callable[..., None]:
    """Give a command function an option for each setting of its targets' settings classes."""
    options = _options(classes)

    @wraps(function)
    def called(**values: Any) -> None:
        pairs = [(option, value) for option in options if (value := _pop_value(option, values)) is not None]
        try:
            function(**values, options=OptionValues(classes, tuple(pairs)))
        except SurgeryError as error:
            flags = {each.name: option.flag for option, _ in pairs for each in option.settings.values()}
            error.flag = flags.get(error.setting)
            raise

    hints, parameters = get_type_hints(function, include_extras=True), []
    for own in inspect.signature(function).parameters.values():
        if own.name == "options":
            parameters += [parameter for option in options for parameter in option.parameters()]
        else:
            parameters.append(_parameter(own.name, hints[own.name], own.default))
    called.__signature__ = inspect.Signature(parameters)
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _options(classes: Mapping[str, type]) -> list[SettingOption]:
    """Return the options of all settings classes, sorted by panel."""
    by_flag: dict[str, dict[str, Setting]] = {}
    for target, cls in classes.items():
        for each in settings_of(cls).values():
            if not each.info.in_file:
                by_flag.setdefault(each.flag, {})[target] = each
    options = [SettingOption(key, settings, len(classes)) for key, settings in by_flag.items()]
    order = list(dict.fromkeys(each.panel for each in options))
    if len(classes) > 1:
        order.sort(key=_rank)
    return sorted(options, key=lambda each: order.index(each.panel))


def _rank(panel: str) -> int:
    """Rank the panels of several targets: sizes first, a single target's options before those of every conversion."""
    last = (INPUTS, MACHINE, OUTPUT)
    return 0 if panel == "Budget" else 2 if panel.startswith("--to") else 3 if panel in last else 1


def _pop_value(option: SettingOption, values: dict[str, Any]) -> Any:
    """Remove an option's value from the values of all parameters and return it.

    Raises SurgeryError: the option is given by two of its flags.
    """
    flags = {option.key: option.flag, **option.old}
    by_flag = {flag: value for key, flag in flags.items() if (value := values.pop(key)) not in (None, [])}
    if len(by_flag) > 1:
        raise SurgeryError(f"{' and '.join(by_flag)} are the same option: pass only one")
    for flag in by_flag.keys() - {option.flag}:
        print(f"surgery: note: {flag} is {option.flag} now", file=sys.stderr)
    return next(iter(by_flag.values()), None)


def _default(setting: Setting) -> str:
    default = setting.default
    if default is None:
        return setting.info.unset
    if isinstance(default, bool):
        return f"on; {_flag(f'no-{setting.flag}')} for off" if default else ""
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _with_targets(parts: list[tuple[str, list[str]]]) -> str:
    return parts[0][0] if len(parts) == 1 else "; ".join(f"{', '.join(targets)}: {text}" for text, targets in parts)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
