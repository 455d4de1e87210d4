"""A YAML file of settings, whoever wrote it: plain values only, and no more of them than a person would read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgery.common.errors import SurgeryError

# Aliases let a few lines stand for billions of values. The largest recipe that ships has a few hundred.
MOST_VALUES = 100_000


def read_yaml(path: str | Path) -> Any:
    """What a YAML file holds, as plain values; None for an empty one.

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
            raise SurgeryError(f"{path}: its aliases stand for more than {MOST_VALUES:,} values; write them out")
        return loader.construct_document(node)
    except (OSError, yaml.YAMLError) as error:
        raise SurgeryError(f"{path}: {' '.join(str(error).split())}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # Dates and numbers that are none, and nesting without end, which PyYAML does not call errors of its own.
        raise SurgeryError(f"{path}: no readable YAML ({' '.join(str(error).split())})") from None


def _values(node: Any, known: dict[int, int]) -> int:
    """Nodes below one and itself, an alias counting as what it stands for; endless for one that holds itself."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # until it is counted: met again, it is within itself
        inner = node.value if isinstance(node.value, list) else []
        pairs = [each for pair in inner for each in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_values(each, known) for each in pairs)
    return known[id(node)]
