"""Files of a conversion that are there while it runs: one a layer, in a temporary folder."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TypeVar

Self = TypeVar("Self", bound="LayerFiles")


class LayerFiles:
    """A context manager that removes its folder, which is made where ``TMPDIR`` says, at its end."""

    def __init__(self, kind: str):
        self._folder = tempfile.TemporaryDirectory(prefix=f"surgery-{kind}-")

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc) -> None:
        self._folder.cleanup()

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    def _path(self, layer: int, suffix: str) -> Path:
        return self.folder / f"{layer:05d}{suffix}"
