"""Checks that wandb can log a run, before the work that the run is about."""

from __future__ import annotations

import os

from surgery.common.errors import SurgeryError

HOST = "https://api.wandb.ai"
SECONDS = 10
"""Seconds to wait for wandb to start or answer; wandb's own default is minutes."""


def init_mode(mode: str) -> str | None:
    """Return the argument `mode` of `wandb.init`: None for "online", which the variable WANDB_MODE can override."""
    return None if mode == "online" else mode


def check_wandb(mode: str, *, connect: bool = False) -> None:
    """Check that wandb is installed and, if it will log online, has a key, which the service accepts if asked.

    Raises SurgeryError about ``wandb``: the check failed.
    """
    try:
        import wandb
    except ImportError:
        raise SurgeryError("logging to wandb needs wandb: pip install wandb", setting="wandb") from None
    if mode != "online" or os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return
    if not _has_key():
        raise SurgeryError("not logged in to wandb; run wandb login, or use wandb_mode offline", setting="wandb")
    if connect:
        try:
            _ = wandb.Api(timeout=SECONDS).viewer
        except Exception as error:  # wandb and its HTTP client raise many classes
            reason = " ".join(str(error).split())[:200]
            raise SurgeryError(f"no connection to wandb: {reason}; use wandb_mode offline", setting="wandb") from error


def _has_key() -> bool:
    """Return whether wandb has a key in the environment or the netrc file; wandb itself would prompt for one."""
    from requests.utils import get_netrc_auth

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    return get_netrc_auth(os.environ.get("WANDB_BASE_URL") or HOST) is not None
