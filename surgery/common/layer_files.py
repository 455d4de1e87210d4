"""Files of a conversion that are there while it runs: one a layer."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from surgery.common.temporary import TemporaryFolder

Self = TypeVar("Self", bound="LayerFiles")


class LayerFiles:
    """A context manager over a folder of files.

    Args:
        kind: of files, for the folder's name.
        parent: where the folder is made, if it is not there, and stays; None for a temporary one, where ``TMPDIR``
            says, that goes at the end.
    """

    def __init__(self, kind: str, parent: Path | None = None):
        self._temporary = None
        if parent is None:
            self._temporary = TemporaryFolder(kind)
            self.folder = self._temporary.path
        else:
            self.folder = parent / kind
            self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc) -> None:
        if self._temporary is not None:
            self._temporary.remove()

    def _path(self, layer: int, suffix: str) -> Path:
        return self.folder / f"{layer:05d}{suffix}"
