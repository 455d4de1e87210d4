"""Lineage: the id under which a conversion, its healings and their evaluations are filed wherever they are tracked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPORT = "surgery_report.json"


def lineage(report: Mapping[str, Any]) -> str:
    """A name for all that results from a conversion: its target, and a hash of its source and settings.

    The report of a healed checkpoint still has both; a published one, whose settings have no folders, the name itself.

    Raises:
        KeyError: it is no report of a conversion.
    """
    if isinstance(report.get("lineage"), str):
        return report["lineage"]
    target = report["target"]
    facts = [report["source"]["sha256"], target["to"], target["method"], report["settings"]]
    return f"{target['to']}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]}"


def lineage_of(folder: str | Path) -> str | None:
    """Return the lineage of the checkpoint in a folder; None where no conversion of this package made it."""
    try:
        return lineage(json.loads((Path(folder) / REPORT).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
