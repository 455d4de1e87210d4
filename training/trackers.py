"""Start of a training's wandb run, through accelerate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from surgery.common.errors import SurgeryError
from surgery.common.lineage import lineage_of
from surgery.common.wandb_service import SECONDS, init_mode
from surgery.training.settings import HealSettings


def tracker_folder(settings: HealSettings) -> Path:
    """Return the folder for wandb's files."""
    return Path(settings.tracker_folder or f"{settings.out}.run").expanduser().resolve()


def start_tracker(accelerator: Accelerator, settings: HealSettings, folder: Path) -> None:
    """Start wandb with an existing folder for its files, before models load. Raises SurgeryError: it does not start."""
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


def _wandb_options(settings: HealSettings, folder: Path) -> dict[str, Any]:
    """Build the arguments of `wandb.init`; the run is grouped with the student's conversion and evaluations."""
    import wandb

    quiet = wandb.Settings(silent=True, console="off", init_timeout=SECONDS)
    together = {"name": folder.stem, "group": lineage_of(settings.student), "job_type": "heal"}
    return {"mode": init_mode(settings.wandb_mode), "dir": str(folder), "settings": quiet, **together}
