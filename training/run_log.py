"""Log of a run: one JSON object a line in a file, always, and a tracker in addition if one is set."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.checkpoint.disk import disk_errors, written_whole
from surgery.training.trackers import Tracker


class RunLog:
    """The lines of one run; only the main process writes any.

    Every line has `event`: "start", "step", "held_out", "evaluation", "checkpoint", "resume", "stop", "tracker"
    (what failed of it) or "end".
    """

    def __init__(self, path: Path, *, writes: bool, tracker: Tracker | None = None) -> None:
        """Opens the file to append to it.

        Args:
            path: of the JSONL file; its folder exists.
            writes: whether this process does.
            tracker: is told the numbers of steps too; None for no tracker. Closing the log ends it.

        Raises:
            SurgeryError: the file cannot be written.
        """
        self.path, self.tracker = path, tracker or Tracker()
        self._file = None
        if writes:
            with disk_errors(path):
                self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 held until close

    def write(self, event: str, **values: Any) -> None:
        """One line, on the disk when the call is over: a run that is killed must not lose what it said."""
        if self._file is not None:
            line = json.dumps({"event": event, **_plain(values)})
            with disk_errors(self.path):
                self._file.write(line + "\n")
                self._file.flush()

    def track(self, step: int, values: Mapping[str, float | None]) -> None:
        """Numbers of a step for the tracker; all processes call it."""
        before = self.tracker.failed
        self.tracker.log(step, values)
        if self.tracker.failed != before:
            self.write("tracker", step=step, failed=self.tracker.failed)

    def close(self) -> None:
        """Ends the tracker and closes the file; a second call does nothing."""
        before = self.tracker.failed
        self.tracker.finish()
        if self.tracker.failed != before:
            self.write("tracker", failed=self.tracker.failed)
        if self._file is not None:
            self._file.close()
            self._file = None


def drop_later_lines(path: Path, step: int) -> None:
    """Takes lines of steps after `step` out of a log: a resumed run takes those steps again.

    Half a line at the end, of a run that was killed as it wrote, goes too.
    """
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
    """JSON has no nan and no infinity."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
