"""Behavior of this project's own programs, unlike programs that import it: `surgery`, and `python -m surgery...`."""

from __future__ import annotations

import re
import sys
from itertools import pairwise

from surgery.common.threads import wait_passively
from surgery.registration import keep_off_kernels


def begin() -> None:
    """To be called before torch is loaded: threads wait passively, and figures are those of the models' own code."""
    wait_passively()
    keep_off_kernels()


def started_as_module() -> bool:
    """Return whether this process is a ``python -m surgery...`` that looks for its module, as launchers start it."""
    if sys.argv[0] != "-m":  # as it is until the module has been found
        return False
    modules = (after for option, after in pairwise(sys.orig_argv[1:]) if re.fullmatch(r"-[a-zA-Z]*m", option))
    return next(modules, "").partition(".")[0] == "surgery"
