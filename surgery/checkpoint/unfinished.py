"""What an interrupted conversion had finished, kept for the same conversion to go on from.

It lies in the ``.partial`` folder of the output, which is locked from the beginning: two conversions to one output are
kept apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.reader import CheckpointReader, Identity
from surgery.checkpoint.snapshots import Snapshots
from surgery.checkpoint.staging import UNFINISHED, Staging
from surgery.common.errors import ProcessLost
from surgery.common.other_threads import other_threads
from surgery.common.progress import Progress

_FACTS = "facts.json"


class Unfinished:
    """A context manager: the output's staging and the folder in it where work lies until there is an output.

    Interrupted work with a snapshot stays. What ends in an error would end so again, and goes.

    Args:
        source: what the work begins with, known by its fingerprint, which is taken here. Of files that nobody touched
            since the work was begun, it is the one that was taken then.
        facts: all else that the work follows from, as plain values. What was begun on other facts or another source,
            or by another torch, is removed, with a line that says so.
        progress: for the hash and lines for people.
        overwrite: as of `Staging`.
        restart: begin anew in any case.

    Attributes:
        staging: of the output.
        folder: where the work lies, once the context is entered.
        snapshots: states of the work's loops.
        resumed: whether there was something to go on from.

    Raises:
        SurgeryError: the output may not be written, or another process is writing it.
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
        # As read back, for comparison.
        self._facts = json.loads(json.dumps({**facts, "torch": torch.__version__}, default=str))
        self._source, self._progress = source, progress
        self._threads, self._restart = torch.get_num_threads(), restart

    def __enter__(self) -> Unfinished:
        kept = self._same_work()
        self.staging.create(keep_unfinished=kept)
        try:
            with disk_errors(self.folder):
                self.folder.mkdir(exist_ok=True)
                begun = {"source": self._source.identity(), "facts": self._facts, "threads": self._threads}
                (self.folder / _FACTS).write_text(json.dumps(begun))
        except BaseException:
            self.staging.discard()
            raise
        self.snapshots = Snapshots(self.folder)
        if damaged := self.snapshots.discard_damaged():
            self._progress.note(f"{self.folder}: damaged, and begun anew: {', '.join(damaged)}")
        self.resumed = self.snapshots.taken()
        if self.resumed:
            self._progress.note(f"goes on with what {self.staging.partial} holds; --restart begins anew")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stays = kind is not None and issubclass(kind, (KeyboardInterrupt, ProcessLost)) and self.snapshots.taken()
        self.staging.discard(keep_unfinished=stays)

    def _same_work(self) -> bool:
        """Whether what is there was begun on the same source and facts."""
        begun, facts, threads = self._begun()
        if not self._source.recall(begun):
            size = sum(self._source.info(name).nbytes for name in self._source.names())
            with self._progress.phase("hash the source", size, "B") as advance:
                self._source.identity(advance)
        if begun is None:
            return False
        if begun.sha256 != self._source.fingerprint() or facts != self._facts:
            anew = "was begun from another source, text, settings or version; begins anew"
            self._progress.note(f"{self.staging.partial}: {anew}")
            return False
        if said := other_threads(threads, self._threads):
            self._progress.note(f"{self.staging.partial}: {said}")
        return True

    def _begun(self) -> tuple[Identity | None, Any, Any]:
        """Source, facts and threads of what is there; None for what is to be left."""
        path = self.folder / _FACTS
        if self._restart or self.folder.is_symlink() or not path.is_file():
            return None, None, None
        try:
            found = json.loads(path.read_text())
            return Identity(*found["source"]), found["facts"], found["threads"]
        except (OSError, ValueError, KeyError, TypeError):
            return None, None, None  # killed while it was written
