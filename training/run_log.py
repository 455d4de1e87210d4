"""What a run says of itself: one JSON object a line in a file, always, and a tracker beside it if one is asked for."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.checkpoint.disk import disk_errors
from surgery.errors import SurgeryError
from surgery.file_settings import did_you_mean
from surgery.training.settings import NO_TRACKER, HealSettings

PACKAGES = {"comet_ml": "comet_ml", "clearml": "clearml", "dvclive": "dvclive", "mlflow": "mlflow"}
PACKAGES |= {"swanlab": "swanlab", "tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb", "aim": "aim"}
"""Trackers of accelerate and the packages that they need."""


def check_tracker(settings: HealSettings) -> None:
    """Raises SurgeryError unless the tracker that is asked for can be used; before anything else is done."""
    tracker = settings.tracker
    if tracker == NO_TRACKER:
        return
    if tracker not in PACKAGES:
        known = [NO_TRACKER, *sorted(PACKAGES)]
        raise SurgeryError(f"tracker {tracker!r} is unknown: choose {', '.join(known)}{did_you_mean(tracker, known)}")
    if importlib.util.find_spec(PACKAGES[tracker]) is None:
        raise SurgeryError(f"tracker {tracker} is not installed: pip install {PACKAGES[tracker]}, or tracker none")
    if tracker == "wandb" and settings.wandb_mode == "online" and not _wandb_can_log_in():
        raise SurgeryError("wandb is asked for, but nobody is logged in: run wandb login, or use wandb_mode offline")


class RunLog:
    """The lines of one run; only the main process writes any.

    Every line has `event`: "start", "step", "held_out", "checkpoint", "resume", "stop" or "end".
    """

    def __init__(self, path: Path, *, writes: bool, tracker: Any = None) -> None:
        """Opens the file to append to it.

        Args:
            path: of the JSONL file; its folder exists.
            writes: whether this process does.
            tracker: accelerate's `Accelerator`, if it logs the same to a tracker; None for no tracker.

        Raises:
            SurgeryError: the file cannot be written.
        """
        self.path, self._tracker = path, tracker
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
        if self._tracker is not None:
            self._tracker.log({name: value for name, value in values.items() if value is not None}, step=step)

    def close(self) -> None:
        """Closes the file and the tracker."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._tracker is not None:
            self._tracker.end_training()
            self._tracker = None


def drop_later_lines(path: Path, step: int) -> None:
    """Takes lines of steps after `step` out of a log: a resumed run takes those steps again.

    Half a line at the end, of a run that was killed as it wrote, goes too.
    """
    with disk_errors(path):
        if not path.exists():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry.get("step", 0) <= step:
                kept.append(line + "\n")
        part = path.with_name(f"{path.name}.partial")
        part.write_text("".join(kept), encoding="utf-8")
        part.replace(path)


def start_tracker(accelerator: Any, settings: HealSettings) -> Any:
    """Starts the tracker through accelerate, if one is asked for; returns the accelerator, or None for no tracker.

    Raises:
        SurgeryError: the tracker refuses.
    """
    if settings.tracker == NO_TRACKER:
        return None
    options = {"wandb": {"mode": settings.wandb_mode}} if settings.tracker == "wandb" else {}
    plain = {
        name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
        for name, value in settings.to_dict().items()
    }
    try:
        accelerator.init_trackers(settings.project, config=plain, init_kwargs=options)
    except Exception as error:  # a tracker may raise anything, and the run has not begun
        reason = " ".join(str(error).split())[:200]
        raise SurgeryError(f"tracker {settings.tracker} does not start: {reason}; tracker none logs locally") from error
    return accelerator


def _plain(value: Any) -> Any:
    """JSON has no nan and no infinity."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _wandb_can_log_in() -> bool:
    """Whether wandb has a key: from the environment, or from the netrc file that `wandb login` writes."""
    import netrc

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return True
    try:
        machines = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in machine for machine in machines)
