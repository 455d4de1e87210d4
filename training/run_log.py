"""Log of a run: a JSONL file, and optionally wandb."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from surgery.checkpoint.disk import disk_errors, written_whole

LOG = "heal.jsonl"
"""Name of the log in a run folder and in its result."""


class RunLog:
    """JSONL log of one run; only the main process writes. Every line has `event`.

    "start", "step", "held_out", "checkpoint", "resume", "stop", "tracker" (its failure) or "end". After a failure of
    the tracker, whose message is `failed`, the run continues without it.
    """

    def __init__(
        self,
        path: Path,
        *,
        writes: bool,
        tracked: Accelerator | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Open the file for appending.

        Args:
            path: path of the JSONL file; its folder exists.
            writes: whether this process writes.
            tracked: accelerator with a started tracker, which gets the values of steps, too; None without one.
            note: reports a failure of the tracker.

        Raises:
            SurgeryError: the file cannot be written.
        """
        self.path, self.failed, self._tracked, self._note = path, None, tracked, note
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
        """Send the values of a step that are not None to the tracker."""
        numbers = {name: value for name, value in values.items() if value is not None}
        self._try("log", lambda: self._tracked.log(numbers, step=step), step=step)

    def wandb_run(self) -> dict[str, str] | None:
        """Return entity, project, run_id and url of the wandb run, as far as known; None without one."""
        run = getattr(next(iter(getattr(self._tracked, "trackers", ())), None), "run", None)
        if not getattr(run, "id", None) or getattr(run, "disabled", False):
            return None
        facts = {"entity": run.entity, "project": run.project, "run_id": run.id, "url": run.url}
        return {name: str(value) for name, value in facts.items() if value}

    def close(self) -> None:
        """Finish the tracker and close the file; a second call does nothing."""
        # Not accelerate's end_training, which destroys the process group, too.
        self._try("finish", lambda: [tracker.finish() for tracker in self._tracked.trackers])
        self._tracked = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _try(self, action: str, function: Callable[[], Any], **values: Any) -> None:
        if self._tracked is None:
            return
        try:
            function()
        except Exception as error:  # a tracker may raise anything, which must not end a run of hours
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            self.failed, self._tracked = f"{action}: {reason}", None
            self.write("tracker", **values, failed=self.failed)
            self._note(
                f"the tracker failed at {action} ({reason}): the run continues without it; all values are in heal.jsonl"
            )


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
