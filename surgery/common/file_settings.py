"""Settings that a YAML file can hold: unknown names are errors, with the nearest known one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.common.errors import SurgeryError
from surgery.common.setting import did_you_mean, names_of, settings_of, shown
from surgery.common.yaml_file import read_yaml

if TYPE_CHECKING:
    from typing_extensions import Self


class FileSettings:
    """Base of the frozen dataclasses of settings: values are of the kind, and within the limits, that fields say."""

    def __post_init__(self) -> None:
        for name, each in settings_of(type(self)).items():
            object.__setattr__(self, name, each.taken(getattr(self, name)))

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
        names = names_of(cls)
        for name in values:
            if name not in names:
                raise SurgeryError(f"{where}: unknown setting {name!r}{did_you_mean(str(name), list(names))}")
        return cls(**typed(cls, {names[name]: value for name, value in values.items()}, where))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def typed(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values as the fields of a dataclass want them.

    Raises:
        SurgeryError: a value is of another kind than its field; says which kind that is.
    """
    known = settings_of(cls)
    return {name: known[name].converted(value, f"{where}: {name}") for name, value in values.items()}


def read_mapping(path: str | Path) -> dict[str, Any]:
    """A YAML file of names and values; an empty one has none.

    Raises:
        SurgeryError: it cannot be read, or holds something else.
    """
    read = read_yaml(path) or {}
    if not isinstance(read, dict):
        raise SurgeryError(f"{path}: holds {shown(read)}; write name: value lines")
    return read
