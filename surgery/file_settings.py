"""Settings that a YAML file can hold: unknown names are errors, with the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.errors import SurgeryError

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
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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
        raise SurgeryError(f"{path}: not a list of settings")
    return read


def did_you_mean(name: str, known: list[str]) -> str:
    """A hint at the nearest known name, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
