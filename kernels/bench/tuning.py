"""Tries configurations of a kernel at a shape and keeps the fastest that computes the same.

Operators ask `tuned.tuned` for their configuration. While `tuned.trial` holds a candidate it answers with that one, and
remembers the shapes that it was asked for, so that no operator has to know of tuning.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surgery.kernels import tuned
from surgery.kernels.tuned import Candidate

GRID: dict[str, tuple[int, ...]] = {"block_tokens": (32, 64, 128), "warps": (4, 8), "stages": (2, 3, 4)}
SPLITS = (1, 4, 8, 16, 32, 64)
"""Tried with the best of the grid, for operations that split the tokens of a row."""


def candidates(*, splits: bool) -> tuple[list[Candidate], list[Candidate]]:
    """The grid; and what is tried on top of its best."""
    grid = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    return [{}, *grid], [{"splits": count} for count in SPLITS] if splits else []


def tune(
    operation: str,
    seconds_of: Callable[[], float],
    is_right: Callable[[], bool],
    *,
    splits: bool,
    out_of_time: Callable[[], bool],
) -> tuple[str, Candidate, list[dict]] | None:
    """Finds the fastest candidate.

    Args:
        operation: whose configuration is tried, in case the call runs several.
        seconds_of: measures a call under the candidate that is being tried.
        is_right: whether it still computes the same.
        out_of_time: asked before each candidate.

    Returns:
        The shape's key, the best candidate (empty: the default), and what each took; None if the operator asked for no
        configuration.
    """
    key, best, least, trials = None, {}, float("inf"), []
    first, then = candidates(splits=splits)
    for stage in (first, then):
        base = dict(best)
        for candidate in ({**base, **more} for more in stage):
            if out_of_time():
                break
            with tuned.trying(candidate) as keys:
                try:
                    seconds = seconds_of() if is_right() else None
                except Exception as error:  # too much shared memory, a block that the kernel has no use for
                    trials.append({"config": candidate, "refused": f"{type(error).__name__}: {str(error)[:80]}"})
                    continue
            key = keys.get(operation, key)
            trials.append({"config": candidate, "seconds": seconds})
            if seconds is not None and seconds < least:
                best, least = candidate, seconds
    return None if key is None else (key, best, trials)


def write_tuned(path: Path, operation: str, key: str, candidate: Candidate) -> None:
    """Adds a configuration to a GPU's file, or makes it, and has operators of this process run with it."""
    merged = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    merged.setdefault(operation, {})[key] = candidate
    write_json(path, {name: dict(sorted(shapes.items())) for name, shapes in sorted(merged.items())})
    tuned.use(operation, key, candidate)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
