"""Statistics that outlive their conversion, for further ones of the same source and text.

What is kept are moments, a few matrices in float64 per layer of the width of keys and values and one of the hidden
size. What entered each layer is not: conversions that read it run the source forward again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from surgery.calibration.library import StatisticsLibrary
from surgery.checkpoint.disk import disk_errors
from surgery.version import __version__

WITH_LAGS = "fisher"
"""Method whose statistics have attention over lags next to what all have."""


class KeptStatistics:
    """The statistics of one source on one text, one folder among others.

    Args:
        folder: holds any number of them; made when the first is kept.
        facts: all that the statistics follow from, as JSON; another version of the package counts as other facts.
    """

    def __init__(self, folder: str | Path, facts: dict[str, Any]):
        self._parent, self._facts = Path(folder), {**facts, "version": __version__}
        self._folder = self._place(self._facts)

    def read_into(self, library: StatisticsLibrary) -> bool:
        """Fills the library if there are such statistics, or such with lags where none are asked for; whether so."""
        folders = [self._folder]
        if self._facts.get("lags_of") is None:
            folders.append(self._place({**self._facts, "lags_of": WITH_LAGS}))
        for folder in folders:
            if folder.is_dir():
                self._copy(folder, library.folder)
                return True
        return False

    def _place(self, facts: dict[str, Any]) -> Path:
        return self._parent / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    def keep(self, library: StatisticsLibrary) -> None:
        """Keeps what the library holds; whole or not at all. Raises SurgeryError where the disk is full."""
        with disk_errors(self._folder):
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._folder.parent))
            try:
                self._copy(library.folder, staging)
                (staging / "facts.json").write_text(json.dumps(self._facts, indent=2) + "\n")
                if not self._folder.exists():  # another process may have been faster
                    os.replace(staging, self._folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)

    def _copy(self, source: Path, target: Path) -> None:
        for path in source.glob(f"?????{StatisticsLibrary.suffix(self._facts.get('first_tokens', 0))}"):
            shutil.copyfile(path, target / path.name)
