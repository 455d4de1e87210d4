"""A tracker beside a run's own log: refused early where it cannot work, and never the end of a run that it follows."""

from __future__ import annotations

import importlib.util
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import did_you_mean
from surgery.common.lineage import lineage_of
from surgery.training.settings import NO_TRACKER, HealSettings

PACKAGES = {"comet_ml": ("comet_ml",), "clearml": ("clearml",), "dvclive": ("dvclive",), "mlflow": ("mlflow",)}
PACKAGES |= {"swanlab": ("swanlab",), "tensorboard": ("tensorboard", "tensorboardX"), "trackio": ("trackio",)}
PACKAGES |= {"wandb": ("wandb",), "aim": ("aim",)}
"""Trackers of accelerate, and the packages of which each needs one."""

WANDB_HOST = "https://api.wandb.ai"
SECONDS = 10
"""How long a service may take to answer at all. Its own client would try for minutes."""


def check_tracker(settings: HealSettings) -> None:
    """Raises SurgeryError unless the tracker that is asked for is there, and knows who asks. Touches no network."""
    tracker = settings.tracker
    if tracker == NO_TRACKER:
        return
    if tracker not in PACKAGES:
        known = [NO_TRACKER, *sorted(PACKAGES)]
        raise SurgeryError(f"tracker {tracker!r} is unknown: choose {', '.join(known)}{did_you_mean(tracker, known)}")
    if not any(importlib.util.find_spec(package) for package in PACKAGES[tracker]):
        raise SurgeryError(f"tracker {tracker} is not installed: pip install {PACKAGES[tracker][0]}, or tracker none")
    if _wandb_online(settings) and not _wandb_knows_a_key():
        raise SurgeryError("wandb is asked for, but nobody is logged in: run wandb login, or use wandb_mode offline")


class Tracker:
    """The tracker of a run, through accelerate; nothing where none is asked for.

    All processes make every call; accelerate lets the main one act.

    Attributes:
        failed: what went wrong with it after it had started; None for nothing. A run goes on without it.
    """

    def __init__(self, accelerator: Any = None, note: Callable[[str], None] = lambda text: None) -> None:
        """Of an accelerator that has started its trackers; None for no tracker. `note` says what fails."""
        self._accelerator, self._note = accelerator, note
        self.failed: str | None = None

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Numbers of a step; those that are None are left out."""
        numbers = {name: value for name, value in values.items() if value is not None}
        self._try("log", lambda: self._accelerator.log(numbers, step=step))

    def finish(self) -> None:
        """Ends it; it takes nothing after that. A second call does nothing."""

        def end() -> None:
            # Not accelerate's end_training, which ends the processes' talk with each other, too.
            for tracker in self._accelerator.trackers:
                tracker.finish()

        self._try("finish", end)
        self._accelerator = None

    def run(self) -> dict[str, str] | None:
        """Where wandb has the run: entity, project, run_id and url, as far as it says; None where nothing is kept."""
        run = getattr(next(iter(getattr(self._accelerator, "trackers", ())), None), "run", None)
        if not getattr(run, "id", None) or getattr(run, "disabled", False):
            return None
        found = {"entity": run.entity, "project": run.project, "run_id": run.id, "url": run.url}
        return {name: str(value) for name, value in found.items() if value}

    def _try(self, what: str, function: Callable[[], None]) -> None:
        if self._accelerator is None:
            return
        try:
            function()
        except Exception as error:  # a tracker may raise anything, and a run of hours must not end for it
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            self.failed = f"{what}: {reason}"
            self._accelerator = None
            self._note(
                f"the tracker failed at {what} ({reason}): the run goes on without it, heal.jsonl has everything"
            )


def tracker_folder(settings: HealSettings) -> Path:
    """Where a tracker that writes files does."""
    return Path(settings.tracker_folder or f"{settings.out}.run").expanduser().resolve()


def start_tracker(
    accelerator: Any,
    settings: HealSettings,
    folder: Path,
    note: Callable[[str], None] = lambda text: None,
) -> Tracker:
    """Starts the tracker that is asked for; the main process calls it before anything large is done.

    Args:
        folder: exists; for what the tracker writes.

    Raises:
        SurgeryError: its service cannot be reached, or it refuses.
    """
    if settings.tracker == NO_TRACKER:
        return Tracker()
    if _wandb_online(settings):
        _reach(os.environ.get("WANDB_BASE_URL") or WANDB_HOST)
    plain = {
        name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
        for name, value in settings.to_dict().items()
    }
    try:
        accelerator.init_trackers(settings.project, config=plain, init_kwargs=_options(settings, folder))
    except Exception as error:  # a tracker may raise anything, and the run has not begun
        reason = " ".join(str(error).split())[:200]
        raise SurgeryError(f"tracker {settings.tracker} does not start: {reason}; tracker none logs locally") from error
    return Tracker(accelerator, note)


def _options(settings: HealSettings, folder: Path) -> dict[str, dict[str, Any]]:
    if settings.tracker != "wandb":
        return {}
    import wandb

    quiet = wandb.Settings(silent=True, console="off")
    # Beside the conversion that is healed, and what is measured of it.
    together = {"name": folder.stem, "group": lineage_of(settings.student), "job_type": "heal"}
    return {"wandb": {"mode": settings.wandb_mode, "dir": str(folder), "settings": quiet, **together}}


def _reach(address: str) -> None:
    """Raises SurgeryError where nothing answers there; proxies of the environment are used."""
    try:
        urllib.request.urlopen(address, timeout=SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it answers, and what it thinks of the key its client will say
    except (OSError, ValueError) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())[:100]
        raise SurgeryError(
            f"wandb cannot be reached at {address} ({reason}): use wandb_mode offline, and wandb sync later"
        ) from None


def _wandb_online(settings: HealSettings) -> bool:
    """Whether the run goes to the service at once; the environment can say otherwise, as wandb has it."""
    if settings.tracker != "wandb" or settings.wandb_mode != "online":
        return False
    return os.environ.get("WANDB_MODE") not in ("offline", "disabled", "dryrun")


def _wandb_knows_a_key() -> bool:
    """Whether wandb has a key: from the environment, or from the netrc file that `wandb login` writes."""
    import netrc

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = (os.environ.get("WANDB_BASE_URL") or WANDB_HOST).split("//")[-1].split("/")[0].split(":")[0]
    try:
        machines = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any(machine == host or "wandb" in machine for machine in machines)
