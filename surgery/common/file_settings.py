"""Settings classes that load from YAML files. Unknown names are errors that suggest the closest setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.common.errors import SurgeryError
from surgery.common.removed import removal
from surgery.common.setting import did_you_mean, names_of, nearest, settings_of, shown

if TYPE_CHECKING:
    from typing_extensions import Self


class FileSettings:
    """Base class of the frozen settings dataclasses; converts and validates the values of all fields."""

    def __post_init__(self) -> None:
        for name, each in settings_of(type(self)).items():
            object.__setattr__(self, name, each.parse(getattr(self, name)))

    @classmethod
    def from_file(cls, path: str | Path, **overrides: Any) -> Self:
        """Read settings from a YAML file; ``overrides`` that are not None take precedence.

        Raises SurgeryError: the file cannot be read, or contains an unknown setting.
        """
        values = {name: value for name, value in overrides.items() if value is not None}
        return cls.from_mapping({**read_mapping(path), **values}, str(path))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str) -> Self:
        """Build settings from a mapping of names to values; ``where`` names the origin in error messages.

        Raises SurgeryError: a name is unknown, or a value is not allowed.
        """
        names = names_of(cls)
        for name in values:
            if name not in names:
                if notice := removal(str(name)):
                    raise SurgeryError(f"{where}: {name} {notice}", setting=str(name), hint=notice)
                message = f"{where}: unknown setting {name!r}{did_you_mean(str(name), list(names))}"
                raise SurgeryError(message, setting=str(name), hint=nearest(str(name), list(names)))
        return cls(**typed(cls, {names[name]: value for name, value in values.items()}, where))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def typed(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert values to the types of a dataclass's fields.

    Raises SurgeryError: a value cannot be converted; the message names the expected type.
    """
    settings = settings_of(cls)
    return {name: settings[name].converted(value, f"{where}: {name}") for name, value in values.items()}


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping; {} for an empty file.

    Raises SurgeryError: the file cannot be read, or its top level is not a mapping.
    """
    read = read_yaml(path) or {}
    if not isinstance(read, dict):
        raise SurgeryError(f"{path}: must be a mapping, not {shown(read)}; write lines of name: value", path=path)
    return read


# YAML aliases can expand a few lines to billions of values. The largest recipe of the package has a few hundred.
MOST_VALUES = 100_000


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file as plain values; None for an empty file.

    Raises SurgeryError: the file cannot be read, is invalid YAML, contains Python objects, or its aliases expand to too
    many values.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(node, {}) > MOST_VALUES:
            message = f"{path}: its YAML aliases expand to more than {MOST_VALUES:,} values; write them out"
            raise SurgeryError(message, path=path)
        return loader.construct_document(node)
    except OSError as error:
        raise SurgeryError(f"{path}: {error.strerror or error}; check the path", path=path) from None
    except yaml.YAMLError as error:
        raise SurgeryError(f"{path}: {' '.join(str(error).split())}", path=path) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # PyYAML raises these for invalid dates and numbers and for deep nesting.
        raise SurgeryError(f"{path}: not valid YAML ({' '.join(str(error).split())})", path=path) from None


def _values(node: Any, counts: dict[int, int]) -> int:
    """Count a node and its descendants, aliases expanded; more than `MOST_VALUES` for a node that contains itself."""
    if id(node) not in counts:
        counts[id(node)] = MOST_VALUES + 1  # a node found again while it is counted contains itself
        inner = node.value if isinstance(node.value, list) else []
        pairs = [each for pair in inner for each in (pair if isinstance(pair, tuple) else (pair,))]
        counts[id(node)] = 1 + sum(_values(each, counts) for each in pairs)
    return counts[id(node)]
