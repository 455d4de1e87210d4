"""Note about work that resumes with another number of threads, which changes the order of summation."""

from __future__ import annotations


def other_threads(before: object, now: int) -> str | None:
    """Return a note on the changed number of threads; None if it is unchanged or the former number is unknown."""
    if not isinstance(before, int) or before == now:
        return None
    return f"started with {before} threads, resuming with {now}: results may differ in the last digits"
