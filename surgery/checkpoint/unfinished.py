"""Unfinished conversions: the state of an interrupted conversion, from which the same command resumes.

The state lies in the output's ``.partial`` folder, which is locked against a second conversion to the same output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from surgery.checkpoint.disk import disk_errors, write_whole
from surgery.checkpoint.reader import CheckpointReader, Identity
from surgery.checkpoint.snapshots import Snapshots
from surgery.checkpoint.staging import UNFINISHED, Staging
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress

_FACTS = "facts.json"


class Unfinished:
    """Context manager over an output's staging folder and the folder for unfinished work in it.

    Work with a snapshot is kept on interruption, and on errors of a run that resumed it. It is removed when the output
    is complete, or by ``restart``. A first run that fails leaves nothing, since it would fail again.

    Args:
        source: source checkpoint, identified by its fingerprint, which untouched files need not compute again.
        facts: all other inputs of the work, as plain values. Work with other ones or another torch version is refused.

    Raises SurgeryError: the output may not be written, another process is writing it, or the existing work is
    different.
    """

    def __init__(
        self,
        out: Path,
        source: CheckpointReader,
        facts: Mapping[str, Any],
        progress: Progress,
        *,
        overwrite: bool = False,
        restart: bool = False,
    ):
        self.staging = Staging(out, overwrite=overwrite)
        self.folder = self.staging.partial / UNFINISHED
        # Normalized by JSON for comparison with the stored facts.
        self._facts = json.loads(json.dumps({**facts, "torch": torch.__version__}, default=str))
        self._source, self._progress = source, progress
        self._restart = restart

    def __enter__(self) -> Unfinished:
        resumes = self._same_work()
        self.staging.create(keep_unfinished=resumes)
        try:
            with disk_errors(self.folder):
                self.folder.mkdir(exist_ok=True)
            record = {"source": self._source.identity(), "facts": self._facts}
            write_whole(self.folder / _FACTS, json.dumps(record))
        except BaseException:
            self.staging.discard(keep_unfinished=resumes)
            raise
        self.snapshots = Snapshots(self.folder)
        self.resumed = self.snapshots.has_state()
        if self.resumed:
            self._progress.note(f"resuming from {self.staging.partial}; --restart discards it")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stays = kind is not None and (self.resumed or issubclass(kind, KeyboardInterrupt))
        stays = stays and self.snapshots.has_state()
        self.staging.discard(keep_unfinished=stays)
        if stays:
            self._progress.note(f"{self.staging.partial} keeps the finished work; --restart discards it")

    def _same_work(self) -> bool:
        """Return whether the existing work has the same source and facts.

        Raises SurgeryError: it differs and has a state to resume from.
        """
        record, facts = self._read_record()
        if not self._source.recall(record):
            size = sum(self._source.info(name).nbytes for name in self._source.names())
            with self._progress.phase("hash the source", size, "B") as advance:
                self._source.identity(advance)
        differences = ["settings that cannot be read"] if record is None else self._differences(record, facts)
        if differences and not self._restart and Snapshots(self.folder).has_state():
            raise SurgeryError.at(
                self.staging.partial,
                f"contains unfinished work with {', '.join(differences)}; use the same to resume it,"
                " pass --restart to discard it, or choose another --out",
            )
        return not differences

    def _differences(self, record: Identity, facts: Any) -> list[str]:
        """Describe the differences between the existing work and this work."""
        differences = [] if record.sha256 == self._source.fingerprint() else ["another source"]
        before, now = ({"settings": {}, **each, **(each.get("settings") or {})} for each in (facts, self._facts))
        names = [name for name in {**before, **now} if name != "settings" and before.get(name) != now.get(name)]
        return differences + [
            "another text" if name == "texts" else f"{name} {_shown(before.get(name))}, not {_shown(now.get(name))}"
            for name in names
        ]

    def _read_record(self) -> tuple[Identity | None, Any]:
        """Read source and facts of the existing work; None if missing, invalid or to be discarded."""
        path = self.folder / _FACTS
        if self._restart or not path.is_file():
            return None, None
        try:
            marker = json.loads(path.read_text())
            return Identity(*marker["source"]), dict(marker["facts"])
        except (OSError, ValueError, KeyError, TypeError):
            return None, None


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
