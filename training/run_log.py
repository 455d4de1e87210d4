"""Log of a run: a JSONL file, and optionally a tracker."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.checkpoint.disk import disk_errors, written_whole
from surgery.training.trackers import Tracker

LOG = "heal.jsonl"
"""Name of the log in a run folder and in its result."""


class RunLog:
    """JSONL log of one run; only the main process writes. Every line has `event`.

    "start", "step", "held_out", "evaluation", "checkpoint", "resume", "stop", "tracker" (its failure) or "end".
    """

    def __init__(self, path: Path, *, writes: bool, tracker: Tracker | None = None) -> None:
        """Open the file for appending.

        Args:
            path: path of the JSONL file; its folder exists.
            writes: whether this process writes.
            tracker: tracker that gets the values of steps, too; `close` finishes it. None for no tracker.

        Raises:
            SurgeryError: the file cannot be written.
        """
        self.path, self.tracker = path, tracker or Tracker()
        self._file = None
        if writes:
            with disk_errors(path):
                self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 held until close

    def write(self, event: str, **values: Any) -> None:
        """Write one line and flush it, so that a killed run loses none."""
        if self._file is not None:
            line = json.dumps({"event": event, **_plain(values)})
            with disk_errors(self.path):
                self._file.write(line + "\n")
                self._file.flush()

    def track(self, step: int, values: Mapping[str, float | None]) -> None:
        """Send the values of a step to the tracker; every process must call it."""
        before = self.tracker.failed
        self.tracker.log(step, values)
        if self.tracker.failed != before:
            self.write("tracker", step=step, failed=self.tracker.failed)

    def close(self) -> None:
        """Finish the tracker and close the file; a second call does nothing."""
        before = self.tracker.failed
        self.tracker.finish()
        if self.tracker.failed != before:
            self.write("tracker", failed=self.tracker.failed)
        if self._file is not None:
            self._file.close()
            self._file = None


def drop_later_lines(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`, which a resumed run repeats, and incomplete lines of a killed run."""
    with disk_errors(path):
        if not path.exists():
            return
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry.get("step", 0) <= step:
                lines.append(line + "\n")
        with written_whole(path) as part:
            part.write_text("".join(lines), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Convert a value for JSON, with nan and infinity as strings."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
