"""OpenMP wait policy: idle threads sleep instead of spinning, unless the user sets another policy.

Spinning, the default, is slightly faster on an idle machine and many times slower when other processes compete for the
cores. GNU OpenMP reads the environment once, when torch loads it: call this before. Child processes inherit it.
"""

import os


def wait_passively() -> None:
    """Set OMP_WAIT_POLICY to PASSIVE for this process and its children, unless it is already set."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
