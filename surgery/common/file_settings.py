"""Settings that a YAML file can hold: unknown names are errors, with the nearest known one."""

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
    """Base of the frozen dataclasses of settings: values are of the kind, and within the limits, that fields say."""

    def __post_init__(self) -> None:
        for name, each in settings_of(type(self)).items():
            object.__setattr__(self, name, each.parse(getattr(self, name)))

    @classmethod
    def from_file(cls, path: str | Path, **overrides: Any) -> Self:
        """Reads a YAML file of settings; ``overrides`` that are not None win.

        Raises:
            SurgeryError: the file cannot be read, or names a setting that does not exist.
        """
        values = {name: value for name, value in overrides.items() if value is not None}
        return cls.from_mapping({**read_mapping(path), **values}, str(path))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str) -> Self:
        """Settings from names and values; ``where`` names their place in an error.

        Raises:
            SurgeryError: a name is unknown, or a value is not allowed.
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
    """Values as the fields of a dataclass want them.

    Raises:
        SurgeryError: a value is of another kind than its field; says which kind that is.
    """
    settings = settings_of(cls)
    return {name: settings[name].converted(value, f"{where}: {name}") for name, value in values.items()}


def read_mapping(path: str | Path) -> dict[str, Any]:
    """A YAML file of names and values; an empty one has none.

    Raises:
        SurgeryError: it cannot be read, or holds something else.
    """
    read = read_yaml(path) or {}
    if not isinstance(read, dict):
        raise SurgeryError(f"{path}: holds {shown(read)}; write name: value lines", path=path)
    return read


# Aliases let a few lines stand for billions of values. The largest recipe that ships has a few hundred.
MOST_VALUES = 100_000


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file as plain values; None for an empty one.

    Raises:
        SurgeryError: it cannot be read, is no YAML, asks for objects, or its aliases stand for too much.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(node, {}) > MOST_VALUES:
            message = f"{path}: its aliases stand for more than {MOST_VALUES:,} values; write them out"
            raise SurgeryError(message, path=path)
        return loader.construct_document(node)
    except OSError as error:
        raise SurgeryError(f"{path}: {error.strerror or error}; check the path", path=path) from None
    except yaml.YAMLError as error:
        raise SurgeryError(f"{path}: {' '.join(str(error).split())}", path=path) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # Dates and numbers that are none, and nesting without end, which PyYAML does not call errors of its own.
        raise SurgeryError(f"{path}: no readable YAML ({' '.join(str(error).split())})", path=path) from None


def _values(node: Any, counts: dict[int, int]) -> int:
    """Nodes below one and itself, an alias counting as what it stands for; endless for one that holds itself."""
    if id(node) not in counts:
        counts[id(node)] = MOST_VALUES + 1  # until it is counted: met again, it is within itself
        inner = node.value if isinstance(node.value, list) else []
        pairs = [each for pair in inner for each in (pair if isinstance(pair, tuple) else (pair,))]
        counts[id(node)] = 1 + sum(_values(each, counts) for each in pairs)
    return counts[id(node)]
