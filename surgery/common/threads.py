"""OpenMP's wait policy: threads sleep while they wait for each other, unless the user says otherwise.

By default they spin, which is a little faster alone and many times slower as soon as other processes want the same
cores. GNU's OpenMP reads the environment once, when torch loads it: call this before. Child processes inherit it.
"""

import os


def wait_passively() -> None:
    """Sets OMP_WAIT_POLICY to PASSIVE for this process and its children; a setting that is there wins."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
