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


def check_wandb(mode: str, setting: str) -> None:
    """Check that wandb is installed and, if it will log online, has a key. Needs no network.

    Raises:
        SurgeryError: the check failed; `setting` is the name of the setting that selects wandb.
    """
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise SurgeryError("logging to wandb needs wandb: pip install wandb", setting=setting) from None
    if _is_online(mode) and not _has_key():
        raise SurgeryError("wandb is not logged in: run wandb login, or use wandb_mode offline", setting=setting)


def check_service(mode: str, setting: str) -> None:
    """Check that wandb's service accepts the key, if it will log online.

    Raises:
        SurgeryError: the service does not answer, or refuses the key.
    """
    if not _is_online(mode):
        return
    import wandb

    try:
        _ = wandb.Api(timeout=SECONDS).viewer
    except Exception as error:  # wandb and its HTTP client raise many classes
        reason = " ".join(str(error).split())[:200]
        raise SurgeryError(f"wandb does not start: {reason}; use wandb_mode offline", setting=setting) from error


def _is_online(mode: str) -> bool:
    return mode == "online" and os.environ.get("WANDB_MODE") not in ("offline", "disabled", "dryrun")


def _has_key() -> bool:
    """Return whether wandb has a key in the environment or the netrc file; wandb itself would prompt for one."""
    from requests.utils import get_netrc_auth

    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    return get_netrc_auth(os.environ.get("WANDB_BASE_URL") or HOST) is not None
