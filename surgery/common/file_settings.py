"""Settings that a YAML file can hold: unknown names are errors, with the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from surgery.common.errors import SurgeryError

if TYPE_CHECKING:
    from typing_extensions import Self


class FileSettings:
    """Base of the dataclasses of settings."""

    @classmethod
    def from_file(cls, path: str | Path, **overrides: Any) -> Self:
        """Reads a YAML file of settings; ``overrides`` that are not None win.

        Raises:
            SurgeryError: the file cannot be read, or names a setting that does not exist.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        return cls.from_mapping({**read_mapping(path), **given}, str(path))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str) -> Self:
        """Settings from names and values; ``where`` names their place in an error.

        Raises:
            SurgeryError: a name is unknown, or a value is not allowed.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise SurgeryError(f"{where}: unknown setting {name!r}{did_you_mean(str(name), known)}")
        return cls(**typed(cls, values, where))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def typed(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values as the fields of a dataclass want them: YAML reads 1e4 as text and 1.0e4 as no whole number.

    Lists and mappings are left to the class.

    Raises:
        SurgeryError: a value is of another kind than its field; says which kind that is.
    """
    hints = get_type_hints(cls)
    found = {}
    for name, value in values.items():
        kinds = get_args(hints[name]) if isinstance(hints[name], UnionType) else (hints[name],)
        try:
            found[name] = _as_one_of(kinds, value)
        except ValueError:
            words = " or ".join(KINDS[kind] for kind in kinds if kind in KINDS)
            raise SurgeryError(f"{where}: {name} must be {words}, not {shown(value)}") from None
    return found


KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def shown(value: Any) -> str:
    """A value in a message, as YAML has it."""
    if isinstance(value, list | tuple | dict):
        return "a list" if not isinstance(value, dict) else "names with values"
    if isinstance(value, bool):
        return str(value).lower()
    return "empty" if value is None else repr(value)


def _as_one_of(kinds: tuple[Any, ...], value: Any) -> Any:
    """Raises ValueError where a value is of none of the kinds, which are classes; others than KINDS take anything."""
    if type(value) in kinds or not set(kinds) - {NoneType} <= KINDS.keys():
        return value
    if value is None or isinstance(value, bool | list | tuple | dict):
        raise ValueError
    if str in kinds:
        return str(value)
    if int in kinds and float not in kinds:
        return whole_number(value)
    if float in kinds:
        return float(value)
    raise ValueError


def whole_number(value: Any) -> int:
    """A whole number, also where it is written 1e4.

    Raises:
        ValueError: it is none.
    """
    number = float(value)
    if not number.is_integer():
        raise ValueError
    return int(value) if isinstance(value, int) else int(number)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """A YAML file of names and values; an empty one has none.

    Raises:
        SurgeryError: it cannot be read, or holds something else.
    """
    import yaml

    try:
        read = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SurgeryError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(read, dict):
        raise SurgeryError(f"{path}: holds {shown(read)}; write name: value lines")
    return read


def did_you_mean(name: str, known: list[str]) -> str:
    """A hint at the nearest known name, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
