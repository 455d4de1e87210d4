"""Quality of source, conversion and healing stages from a healing record, and the cost of the stages."""

from __future__ import annotations

from typing import Any

SAME = 1e-6
"""Largest relative difference of the source's loss between two measurements on the same data."""


def stages(healing: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the healings of a checkpoint since its conversion, oldest first."""
    return [*(healing.get("earlier") or []), healing]


def check_healing(healing: dict[str, Any]) -> None:
    """Check the healing record of a checkpoint.

    Raises:
        TypeError, LookupError, ValueError: a value is missing or has the wrong type.
    """
    for stage in stages(healing):
        for row in stage.get("quality") or []:
            recall = row["recall"]
            numbers = [row["loss"], *([] if recall is None else [recall])]
            if not isinstance(row["name"], str) or any(type(each) not in (int, float) for each in numbers):
                raise TypeError("healing.quality is not a table of losses and recall")
    gap_closed(quality_table(healing))
    stage_facts(healing)


def quality_table(healing: dict[str, Any]) -> list[dict[str, Any]]:
    """Return loss and recall of the source, the conversion and the result of each comparable stage.

    The record of a stage has its own student as "converted". If the previous stage was measured on the same data,
    that student is the previous stage's result, and "converted" is taken from the earliest such stage.
    """
    entries = [{entry["name"]: entry for entry in stage.get("quality") or []} for stage in stages(healing)]
    if not entries[-1]:
        return []
    first = len(entries) - 1
    while first > 0 and _have_same_data(entries[first - 1], entries[-1]):
        first -= 1
    rows = [entries[first][name] for name in ("source", "converted") if name in entries[first]]
    if first > 0:
        rows[-1] = {**rows[-1], "name": f"after stage {first}"}
    for number in range(first, len(entries) - 1):
        rows.append({**entries[number]["healed"], "name": f"healed, stage {number + 1}"})
    return [*rows, entries[-1]["healed"]]


LEAST_GAP = 0.005
"""Loss gap in nats per token below which no share is stated: smaller gaps are within the noise of held-out windows."""


def gap_closed(quality: list[dict[str, Any]]) -> float | None:
    """Compute the share of the conversion's loss increase that healing recovered; None if unmeasured or too small."""
    losses = {entry["name"]: entry["loss"] for entry in quality}
    if not {"source", "converted", "healed"} <= losses.keys():
        return None
    gap = losses["converted"] - losses["source"]
    return (losses["converted"] - losses["healed"]) / gap if gap >= LEAST_GAP else None


def stage_facts(healing: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the training settings and the cost of each stage, formatted for a table."""
    return [_facts(stage) for stage in stages(healing)]


def _facts(stage: dict[str, Any]) -> dict[str, Any]:
    settings = stage["settings"]
    objective = settings.get("objective") or {"kl": 1.0}
    data = [each if isinstance(each, str) else str(each.get("source")) for each in settings["data"]]
    return {
        "trains": settings["train"],
        "objective": ", ".join(f"{name} {weight:g}" for name, weight in objective.items()),
        "learning_rate": settings["learning_rate"],
        "rows": f"{stage['sequences_per_step']} × {settings['length']:,}",
        "data": ", ".join(data),
        "steps": stage["steps"],
        "tokens": stage["tokens"],
        "seconds": stage["seconds"],
        "machine": f"{stage['processes']} × {stage['device']}, {_dtype(stage['precision'])}",
    }


def _dtype(precision: str) -> str:
    return "fp32" if precision == "no" else precision


def _have_same_data(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two stages were measured on the same data, judged by the loss of the source in both."""
    if not ({"source", "converted", "healed"} <= one.keys() and "source" in other):
        return False
    first, second = one["source"]["loss"], other["source"]["loss"]
    return abs(first - second) <= SAME * abs(first)
