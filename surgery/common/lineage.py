"""Lineage: the id shared by a conversion, its healings and their evaluations in experiment trackers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPORT = "surgery_report.json"


def lineage(report: Mapping[str, Any]) -> str:
    """Compute the lineage of a conversion report: its target, and a hash of its source and settings.

    The report of a healed checkpoint still has both; a published report, whose settings lack folders, stores the id.
    Raises KeyError: this is not a conversion report.
    """
    if isinstance(report.get("lineage"), str):
        return report["lineage"]
    target = report["target"]
    facts = [report["source"]["sha256"], target["to"], target["method"], report["settings"]]
    return f"{target['to']}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]}"


def lineage_of(folder: str | Path) -> str | None:
    """Return the lineage of the checkpoint in a folder; None if it is not a result of this package."""
    try:
        return lineage(json.loads((Path(folder) / REPORT).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
