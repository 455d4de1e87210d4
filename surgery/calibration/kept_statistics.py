"""Cache of calibration statistics on disk, for conversions of the same source and text.

It holds moments: per layer, a few float64 matrices of the width of keys and values. Inputs of layers are not stored:
conversions that need them run the source forward again.
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
"""Method whose statistics include lag statistics."""


class KeptStatistics:
    """Entry of the cache: statistics of one source on one text, in a folder.

    Args:
        folder: parent folder of all entries; created on the first write.
        facts: everything that determines the statistics, as JSON; the package's version is added.
    """

    def __init__(self, folder: str | Path, facts: dict[str, Any]):
        self._parent, self._facts = Path(folder), {**facts, "version": __version__}
        self._folder = self._entry_folder(self._facts)

    def read_into(self, library: StatisticsLibrary) -> bool:
        """Copy cached statistics, with or without extra lag statistics, to the library; return whether any exist."""
        folders = [self._folder]
        if self._facts.get("lags_of") is None:
            folders.append(self._entry_folder({**self._facts, "lags_of": WITH_LAGS}))
        for folder in folders:
            if folder.is_dir():
                self._copy(folder, library.folder)
                return True
        return False

    def _entry_folder(self, facts: dict[str, Any]) -> Path:
        return self._parent / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    def keep(self, library: StatisticsLibrary) -> None:
        """Store the library's files atomically. Raises SurgeryError if the disk is full."""
        with disk_errors(self._folder):
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._folder.parent))
            try:
                self._copy(library.folder, staging)
                (staging / "facts.json").write_text(json.dumps(self._facts, indent=2) + "\n")
                if not self._folder.exists():  # another process may have written it
                    os.replace(staging, self._folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)

    def _copy(self, source: Path, target: Path) -> None:
        for path in source.glob(f"?????{StatisticsLibrary.suffix(self._facts.get('first_tokens', 0))}"):
            shutil.copyfile(path, target / path.name)
