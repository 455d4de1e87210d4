"""wandb run of a training, through accelerate: checked before the run; a later failure does not end the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.lineage import lineage_of
from surgery.common.wandb_service import SECONDS, init_mode
from surgery.training.settings import HealSettings


class Tracker:
    """Tracker of a run, or a no-op without one. Every process must make every call; the main process acts.

    After a failure, whose message is `failed`, the run continues without the tracker.
    """

    def __init__(self, accelerator: Any = None, note: Callable[[str], None] = lambda text: None) -> None:
        """Wrap an accelerator that has started its trackers; None for no tracker. `note` reports failures."""
        self._accelerator, self._note = accelerator, note
        self.failed: str | None = None

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Log the values of a step, except those that are None."""
        numbers = {name: value for name, value in values.items() if value is not None}
        self._try("log", lambda: self._accelerator.log(numbers, step=step))

    def finish(self) -> None:
        """Finish the tracker; later calls do nothing."""
        # Not accelerate's end_training, which destroys the process group, too.
        self._try("finish", lambda: [tracker.finish() for tracker in self._accelerator.trackers])
        self._accelerator = None

    def run(self) -> dict[str, str] | None:
        """Return entity, project, run_id and url of the wandb run, as far as known; None without one."""
        run = getattr(next(iter(getattr(self._accelerator, "trackers", ())), None), "run", None)
        if not getattr(run, "id", None) or getattr(run, "disabled", False):
            return None
        facts = {"entity": run.entity, "project": run.project, "run_id": run.id, "url": run.url}
        return {name: str(value) for name, value in facts.items() if value}

    def _try(self, action: str, function: Callable[[], Any]) -> None:
        if self._accelerator is None:
            return
        try:
            function()
        except Exception as error:  # a tracker may raise anything, which must not end a run of hours
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            self.failed = f"{action}: {reason}"
            self._accelerator = None
            self._note(
                f"the tracker failed at {action} ({reason}): the run continues without it; all values are in heal.jsonl"
            )


def tracker_folder(settings: HealSettings) -> Path:
    """Return the folder for wandb's files."""
    return Path(settings.tracker_folder or f"{settings.out}.run").expanduser().resolve()


def start_tracker(
    accelerator: Any, settings: HealSettings, folder: Path, note: Callable[[str], None] = lambda text: None
) -> Tracker:
    """Start the tracker of the settings with an existing folder for its files, before models load.

    Raises SurgeryError: wandb does not start.
    """
    if settings.wandb is None:
        return Tracker()
    plain = {
        name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
        for name, value in settings.to_dict().items()
    }
    try:
        accelerator.init_trackers(settings.wandb, config=plain, init_kwargs={"wandb": _wandb_options(settings, folder)})
    except Exception as error:  # a tracker may raise anything, and the run has not begun
        reason = " ".join(str(error).split())[:200]
        raise SurgeryError(
            f"wandb does not start: {reason}; use wandb_mode offline, or leave wandb out", setting="wandb"
        ) from error
    return Tracker(accelerator, note)


def _wandb_options(settings: HealSettings, folder: Path) -> dict[str, Any]:
    """Build the arguments of `wandb.init`; the run is grouped with the student's conversion and evaluations."""
    import wandb

    quiet = wandb.Settings(silent=True, console="off", init_timeout=SECONDS)
    together = {"name": folder.stem, "group": lineage_of(settings.student), "job_type": "heal"}
    return {"mode": init_mode(settings.wandb_mode), "dir": str(folder), "settings": quiet, **together}
