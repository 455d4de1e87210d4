"""Resident memory of this process, in bytes."""

from __future__ import annotations

import resource
import sys

import psutil


def resident_memory() -> int:
    """Return the current resident memory."""
    return psutil.Process().memory_info().rss


def peak_memory() -> int:
    """Return the peak resident memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
