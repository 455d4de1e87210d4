"""A setting, defined once: name, type and default by a field of a dataclass, the rest by its :func:`setting`.

Checks, options of the command line (surgery.cli.generated) and files of defaults (surgery.common.settings_page) are all
made of that. Frozen dataclasses do it, not pydantic's models: importing pydantic with one model takes 0.4 s, as long as
all of `surgery --help`; settings fill in what others decide and are copied with `dataclasses.replace`; and its messages
would have to be put into one line of ours anyway.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from surgery.common.errors import SurgeryError
from surgery.common.plugins import added
from surgery.common.removed import removal

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


@dataclass(frozen=True)
class FieldInfo:
    """Metadata of a settings field: help, limits, command-line names.

    Attributes:
        help: one line, for the command line and the files.
        more: what only the files say besides.
        unset: what None means.
        none: a word for None.
        kind: what a value must be, where the type says too little.
        section: heading of this setting and of those after it; empty: that of the setting before.
        metavar: what the command line shows for a value.
        flag: the command line's name for it, where it is another; both may stand in a file.
        also: further flags.
        old: flags that still work; a note says the new one.
        advanced: the command line's help shows it with --help-all alone.
        in_file: only a file or a program gives it.
        repeated: of a tuple: the flag may come more than once, and commas cut nothing.
        synonyms: other words for values.
        plugins: kind of what can be plugged in (surgery.common.plugins) and is then a choice too.
        least, above, most, below: limits of a number, or of each in a tuple.
    """

    help: str = ""
    more: str = ""
    unset: str = ""
    none: str | None = None
    kind: str = ""
    section: str = ""
    metavar: str = ""
    flag: str = ""
    also: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    advanced: bool = False
    in_file: bool = False
    repeated: bool = False
    synonyms: Mapping[str, str] | None = None
    plugins: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None


def setting(default: Any = MISSING, help: str = "", *, factory: Any = MISSING, **info: Any) -> Any:
    """A field with its default; without help it says only what differs from the class that this one builds on."""
    return field(default=default, default_factory=factory, metadata={"info": FieldInfo(help, **info)})


@dataclass(frozen=True)
class Setting:
    """A field of a class of settings.

    Attributes:
        kinds: classes of its values; none: any value passes.
        listed: its values, if they are given ones; ``choices`` with what is plugged in.
        optional: None is one.
        many: it is a tuple of such values.
    """

    name: str
    default: Any
    info: FieldInfo
    kinds: tuple[type, ...]
    listed: tuple[Any, ...]
    optional: bool
    many: bool

    @property
    def choices(self) -> tuple[Any, ...]:
        return (*self.listed, *added(self.info.plugins)) if self.info.plugins else self.listed

    @property
    def flag(self) -> str:
        """The command line's name for it, as a file would spell it."""
        return self.info.flag or self.name

    def parse(self, value: Any, where: str = "") -> Any:
        """Convert a value to the field's type and check its limits.

        Raises:
            SurgeryError: it cannot be.
        """
        value = self.converted(value, f"{where}: {self.name}" if where else self.name)
        for each in value if self.many else (value,):
            if each is not None:
                self._check(each)
        return value

    def converted(self, value: Any, called: str) -> Any:
        """A value of the field's kind: YAML reads 1e4 as text and 1.0e4 as no whole number.

        Raises:
            SurgeryError: it is of another kind.
        """
        try:
            if not self.many:
                return self._converted(value)
            if isinstance(value, str) and not self.info.repeated:
                value = [part.strip() for part in value.split(",") if part.strip()]
            items = () if value is None else value if isinstance(value, list | tuple) else (value,)
            return tuple(self._converted(item) for item in items)
        except (ValueError, OverflowError):
            words = self.info.kind or " or ".join(dict.fromkeys(KINDS[kind] for kind in self.kinds))
            words += f" or {self.info.none}" if self.info.none else ""
            text = ", ".join(map(str, value)) if self.many and isinstance(value, list | tuple) else shown(value)
            expected = _plural(words) if self.many else words
            raise SurgeryError(f"{called} must be {expected}, not {text}", setting=self.name, hint=expected) from None

    def _converted(self, value: Any) -> Any:
        if self.info.none is not None and value == self.info.none:
            return None
        if not self.kinds or (value is None and self.optional):
            return value
        if value is None or isinstance(value, list | tuple | dict):
            raise ValueError
        if self.choices:
            word = (self.info.synonyms or {}).get(value, value)
            return next((choice for choice in self.choices if str(choice) == str(word)), value)
        if type(value) in self.kinds:
            return value
        if isinstance(value, bool):
            raise ValueError
        if str in self.kinds:
            return str(value)
        if int in self.kinds:
            return whole_number(value)
        if float in self.kinds:
            return float(value)
        raise ValueError

    def _check(self, value: Any) -> None:
        name, info = self.name, self.info
        if self.choices:
            if value not in self.choices:
                if notice := removal(f"{name} {value}"):
                    raise SurgeryError(f"{name} {value} {notice}", setting=name, hint=notice)
                choices = [str(choice) for choice in self.choices]
                listed = (" or " if len(choices) == 2 else ", ").join(choices)
                message = f"{name} {value!r} is unknown: choose {listed}{did_you_mean(str(value), choices)}"
                raise SurgeryError(message, setting=name, hint=nearest(str(value), choices))
            return
        if (info.least, info.most) == (0, 1) and not 0 <= value <= 1:
            raise SurgeryError(f"{name} is a share: it must be from 0 to 1, not {value}", setting=name)
        if info.below is not None and not info.above < value < info.below:
            message = f"{name} {value} must lie between {info.above} and {info.below}, such as 0.25"
            raise SurgeryError(message, setting=name)
        if info.least is not None and value < info.least:
            raise SurgeryError(f"{name} must be at least {info.least}, not {value}", setting=name)
        if info.above is not None and not value > info.above:
            raise SurgeryError(f"{name} must be above {info.above}, not {value}", setting=name)


@cache
def settings_of(cls: type) -> dict[str, Setting]:
    """The settings of a dataclass by name, a class's own before those of the classes that it builds on."""
    hints, fields_by_name = get_type_hints(cls), {each.name: each for each in fields(cls)}
    settings: dict[str, Setting] = {}
    for each in cls.__mro__:
        section = ""
        for name in inspect.get_annotations(each):
            if name in fields_by_name:
                info = _field_info(each, name)
                section = info.section or section
                settings.setdefault(name, _setting(fields_by_name[name], hints[name], replace(info, section=section)))
    return settings


def names_of(cls: type) -> dict[str, str]:
    """Map the spellings that a file may use, names and flags, to the names of a class's settings."""
    settings = settings_of(cls)
    return {each.flag: name for name, each in settings.items()} | {name: name for name in settings}


def _field_info(cls: type, name: str) -> FieldInfo:
    """Return the metadata of a field, merged over a class and its bases."""
    info = FieldInfo()
    for each in filter(is_dataclass, reversed(cls.__mro__)):
        own = next((own.metadata.get("info") for own in fields(each) if own.name == name), None)
        if own is not None and own.help:
            info = own
        elif own is not None:
            info = replace(info, **{key: value for key, value in vars(own).items() if value != getattr(FieldInfo, key)})
    return info


def _setting(own: Field, hint: Any, info: FieldInfo) -> Setting:
    default = own.default if own.default_factory is MISSING else own.default_factory()
    parts, many = _parts(hint), False
    plain = [part for part in parts if part is not NoneType]
    if len(plain) == 1 and get_origin(plain[0]) is tuple and get_args(plain[0])[-1] is Ellipsis:
        many, plain = True, list(_parts(get_args(plain[0])[0]))
    choices = tuple(choice for part in plain if get_origin(part) is Literal for choice in get_args(part))
    kinds = [type(choice) for choice in choices] + [part for part in plain if get_origin(part) is not Literal]
    is_typed = all(kind in KINDS for kind in kinds)
    return Setting(
        own.name, default, info, tuple(dict.fromkeys(kinds)) if is_typed else (), choices, NoneType in parts, many
    )


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _plural(words: str) -> str:
    return {"a whole number": "whole numbers", "a number": "numbers"}.get(words, words)


def shown(value: Any) -> str:
    """A value in a message, as YAML has it."""
    if isinstance(value, list | tuple | dict):
        return "a list" if not isinstance(value, dict) else "names with values"
    if isinstance(value, bool):
        return str(value).lower()
    return "empty" if value is None else repr(value)


def whole_number(value: Any) -> int:
    """A whole number, also where it is written 1e4.

    Raises:
        ValueError: it is none.
    """
    number = float(value)
    if not number.is_integer():
        raise ValueError
    return int(value) if isinstance(value, int) else int(number)


def nearest(name: str, choices: list[str]) -> str | None:
    """Return the known name that is nearly this one; None if none is."""
    return next(iter(difflib.get_close_matches(name, choices, n=1)), None)


def did_you_mean(name: str, choices: list[str]) -> str:
    """A hint at the nearest known name, or nothing."""
    return f"; did you mean {close}?" if (close := nearest(name, choices)) else ""
