"""Definition of a setting in a single place: a dataclass field with its name, type and default, and :func:`setting`.

Validation, command-line options (surgery.cli.generated) and default settings files (surgery.cli.shipped) are
generated from the fields. Frozen dataclasses are used instead of pydantic: importing pydantic with one model takes
0.4 s, as long as all of `surgery --help`; settings are copied with `dataclasses.replace`; and pydantic's messages would
have to be rewritten as single lines.
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
        help: one line, for the command line and settings files.
        more: additional text for settings files only.
        unset: meaning of None.
        none: word that users write for None.
        kind: expected value in error messages, if the type is not specific enough.
        section: heading of this setting and the following ones; empty: continues the section before.
        metavar: value placeholder in the command line's help.
        flag: flag name if it differs from the field name; files may use both.
        also: additional flags.
        old: deprecated flags, which print a note with the new flag.
        advanced: shown by --help-all only.
        in_file: can be set in files and Python only.
        repeated: tuples only: the flag may be repeated, and values are not split at commas.
        synonyms: alternative spellings of values.
        plugins: plug-in kind (surgery.common.plugins) whose names are additional choices.
        least, above, most, below: inclusive and exclusive limits of a number, or of each number in a tuple.
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
    """Create a dataclass field with `FieldInfo`; without help, the entries given override those of the base class."""
    return field(default=default, default_factory=factory, metadata={"info": FieldInfo(help, **info)})


@dataclass(frozen=True)
class Setting:
    """A field of a settings class.

    ``kinds`` are the allowed types, empty if any value passes; ``listed`` are those of a Literal, to which ``choices``
    adds plug-ins; ``optional``: whether None is allowed; ``many``: whether the field is a tuple.
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
        """Flag name without dashes, with underscores as in a file."""
        return self.info.flag or self.name

    def parse(self, value: Any) -> Any:
        """Convert a value to the field's type and check its limits.

        Raises SurgeryError: the value has the wrong type or exceeds a limit.
        """
        value = self.converted(value, self.name)
        for each in value if self.many else (value,):
            if each is not None:
                self._check(each)
        return value

    def converted(self, value: Any, called: str) -> Any:
        """Convert a value to the field's type, since YAML reads 1e4 as text and 1.0e4 as a float.

        Raises SurgeryError: the value cannot be converted.
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
    """Collect the settings of a dataclass by name, its own fields before those of its base classes."""
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
    """Map the spellings accepted in a file, field names and flags, to field names."""
    settings = settings_of(cls)
    return {each.flag: name for name, each in settings.items()} | {name: name for name in settings}


def _field_info(cls: type, name: str) -> FieldInfo:
    """Merge the metadata of a field over a class and its base classes."""
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
    """Format a value for an error message, in YAML's spelling."""
    if isinstance(value, list | tuple | dict):
        return "a list" if not isinstance(value, dict) else "a mapping"
    if isinstance(value, bool):
        return str(value).lower()
    return "empty" if value is None else repr(value)


def whole_number(value: Any) -> int:
    """Parse an integer, spellings such as 1e4 included. Raises ValueError: the value is not an integer."""
    number = float(value)
    if not number.is_integer():
        raise ValueError
    return int(value) if isinstance(value, int) else int(number)


def nearest(name: str, choices: list[str]) -> str | None:
    """Return the known name closest to this one; None if none is close."""
    return next(iter(difflib.get_close_matches(name, choices, n=1)), None)


def did_you_mean(name: str, choices: list[str]) -> str:
    """Return the end of an error message that suggests the closest known name; empty if none is close."""
    return f"; did you mean {close}?" if (close := nearest(name, choices)) else ""
