"""Recipes and settings files that ship with the package, by name. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import did_you_mean

Kind = Literal["recipes", "configs"]
LISTS = {"recipes": "run", "configs": "config"}
"""Commands that list the files of each kind when called without an argument."""
SUFFIX = ".yaml"


@dataclass(frozen=True)
class Shipped:
    """A recipe or settings file that ships with the package.

    Attributes:
        about: first sentence of the comment at the top of the file.
    """

    name: str
    path: Path
    about: str


def shipped(kind: Kind) -> list[Shipped]:
    """List the shipped files of a kind, sorted by name."""
    return [Shipped(path.stem, path, _about(path)) for path in sorted(_folder(kind).glob(f"*{SUFFIX}"))]


def find_shipped(name: str | Path, kind: Kind) -> Path:
    """Find a file by path, or a shipped file by name. Raises SurgeryError: neither exists."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    names = {each.name: each.path for each in shipped(kind)}
    if str(name) not in names:
        hint = did_you_mean(path.stem, list(names)) or f"; surgery {LISTS[kind]} lists the shipped ones"
        raise SurgeryError(f"{name}: no such file, and no shipped {kind.removesuffix('s')} of that name{hint}")
    return names[str(name)]


def _folder(kind: Kind) -> Path:
    """Return the folder in the package, or at the top of the repository if the symlink is missing."""
    here = Path(__file__).parent.parent
    return here / kind if (here / kind).is_dir() else here.parent / kind


def _about(path: Path) -> str:
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return " ".join(comment).partition(". ")[0].rstrip(".:")
