"""Process setup of this project's programs, `surgery` and `python -m surgery...`, as opposed to library use."""

from __future__ import annotations

import os
import re
import sys
from itertools import pairwise

from surgery.registration import disable_kernels


def begin() -> None:
    """Let OpenMP threads wait passively and keep models on their PyTorch code; call before torch is imported."""
    wait_passively()
    disable_kernels()


def started_as_module() -> bool:
    """Return whether this process was started as ``python -m surgery...`` and Python still resolves the module."""
    if sys.argv[0] != "-m":  # Python keeps "-m" here until it has found the module
        return False
    modules = (after for option, after in pairwise(sys.orig_argv[1:]) if re.fullmatch(r"-[a-zA-Z]*m", option))
    return next(modules, "").partition(".")[0] == "surgery"


def wait_passively() -> None:
    """Let idle OpenMP threads of this process and its children sleep, unless OMP_WAIT_POLICY is already set.

    Spinning, the default, is many times slower when other processes compete for the cores. GNU OpenMP reads the
    variable once, when torch loads it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
