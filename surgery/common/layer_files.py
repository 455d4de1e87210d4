"""Per-layer working files of a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from surgery.common.temporary import TemporaryFolder

Self = TypeVar("Self", bound="LayerFiles")


class LayerFiles:
    """Context manager over a folder with one file per layer.

    Files of a kind stay in ``parent``, or in a temporary folder below ``TMPDIR`` that is removed at the end.
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
