"""Tuning of kernel configurations: times candidates at a shape and keeps the fastest with correct results.

Operators get their configuration from `tuned.tuned`. While `tuned.trial` is set, it returns that candidate and records
the requested shape keys, so that operators need no code for tuning.
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
"""Numbers of splits, tried with the best of the grid for operations that split the tokens of a row."""


def candidates(*, splits: bool) -> tuple[list[Candidate], list[Candidate]]:
    """Return the candidates of the grid, and the fields that a second stage tries on top of the best."""
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
    """Find the fastest candidate with correct results.

    Args:
        operation: operation to tune, in case the call runs several.
        seconds_of: times the call with the current candidate.
        is_right: checks the results with the current candidate.
        splits: also try numbers of splits.
        out_of_time: checked before each candidate.

    Returns:
        The shape key, the best candidate (empty for the default), and the time of each; None if the operator requested
        no configuration.
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
                except Exception as error:  # too much shared memory, or an unsupported block size
                    trials.append({"config": candidate, "refused": f"{type(error).__name__}: {str(error)[:80]}"})
                    continue
            key = keys.get(operation, key)
            trials.append({"config": candidate, "seconds": seconds})
            if seconds is not None and seconds < least:
                best, least = candidate, seconds
    return None if key is None else (key, best, trials)


def write_tuned(path: Path, operation: str, key: str, candidate: Candidate) -> None:
    """Add a configuration to a GPU's file, which is created if missing, and use it in this process."""
    merged = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    merged.setdefault(operation, {})[key] = candidate
    write_json(path, {name: dict(sorted(shapes.items())) for name, shapes in sorted(merged.items())})
    tuned.use(operation, key, candidate)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
