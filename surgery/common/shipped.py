"""Recipes and settings files that ship with the package, by their names. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import did_you_mean

Kind = Literal["recipes", "configs"]
LISTS = {"recipes": "run", "configs": "config"}
"""Commands that list them, without an argument."""
SUFFIX = ".yaml"


@dataclass(frozen=True)
class Shipped:
    """A file that ships.

    Attributes:
        about: the first sentence of the comment that it begins with.
    """

    name: str
    path: Path
    about: str


def shipped(kind: Kind) -> list[Shipped]:
    """All of a kind, by name."""
    return [Shipped(path.stem, path, _about(path)) for path in sorted(_folder(kind).glob(f"*{SUFFIX}"))]


def find_shipped(name: str | Path, kind: Kind) -> Path:
    """The file of that path, or the one of that name that ships.

    Raises:
        SurgeryError: there is neither.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    names = {each.name: each.path for each in shipped(kind)}
    if str(name) not in names:
        hint = did_you_mean(path.stem, list(names)) or f"; surgery {LISTS[kind]} lists those that ship"
        raise SurgeryError(f"{name}: no such file, and no {kind.removesuffix('s')} of that name ships{hint}")
    return names[str(name)]


def _folder(kind: Kind) -> Path:
    """Linked into the package; where links do not exist, at the top of the repository."""
    here = Path(__file__).parent.parent
    return here / kind if (here / kind).is_dir() else here.parent / kind


def _about(path: Path) -> str:
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return " ".join(comment).partition(". ")[0].rstrip(".:")
