"""Note for work that resumes with another number of threads, which add numbers in another order."""

from __future__ import annotations


def other_threads(before: object, now: int) -> str | None:
    """A line for people; None with as many threads, and where nobody knows how many there were."""
    if not isinstance(before, int) or before == now:
        return None
    return f"was begun with {before} threads and goes on with {now}: last digits may differ from those of one run"
