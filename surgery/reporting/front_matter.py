"""Front matter of a model card for the hub: its YAML head, with measurements as a model-index.

https://huggingface.co/docs/hub/model-cards, section on metadata; `model-index` as huggingface_hub reads it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from surgery.checkpoint.file_kinds import SOURCE_CARD
from surgery.common.human import one_line, perplexity
from surgery.engines.in_transformers import PICTURES

LONGEST = 500
"""Characters of a text that is inherited, and entries of a list."""
LONGEST_HEAD = 2**16
"""Characters of a head that is read: of others nothing is inherited."""
HERITABLE = ("license", "license_name", "license_link", "language")
"""Metadata of a source's card that holds for its conversions."""


def front_matter(report, name: str, *, base_model: str | None = None, inherited: dict[str, Any] | None = None) -> str:
    """The head of a card with its two lines of dashes; every value is quoted as YAML wants it.

    Args:
        base_model: hub id of the source, where the report does not know it.
        inherited: of the source's own card (:func:`of_source`).
    """
    base_model = base_model or report.source.get("hub")
    head = {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text" if reads_pictures(report.target) else "text-generation",
        # The hub takes ids only.
        **({"base_model": one_line(base_model)} if base_model else {}),
        **(inherited or {}),
        "tags": ["model-surgery", one_line(report.target["to"]), "kv-cache-compression"],
        "model-index": [{"name": one_line(name), "results": _results(report)}],
    }
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=math.inf)}---\n"


def reads_pictures(target: dict[str, Any]) -> bool:
    """Return whether the result of a conversion is a vision-language model, by the class that loads it."""
    return PICTURES in str(target["engines"].get("transformers"))


def of_source(folder: Path) -> dict[str, Any]:
    """Return the metadata that a checkpoint inherits from its source's card, which lies next to it."""
    try:
        head = (folder / SOURCE_CARD).read_text(encoding="utf-8").split("---\n")[1]
        # Plain texts: safe_load raises ValueError for dates that do not exist, and takes the language `no` for false.
        metadata = yaml.load(head, yaml.BaseLoader) if len(head) <= LONGEST_HEAD else {}
    except (OSError, UnicodeDecodeError, IndexError, RecursionError, ValueError, yaml.YAMLError):
        return {}
    values = {name: metadata.get(name) for name in HERITABLE} if isinstance(metadata, dict) else {}
    return {
        name: [one_line(each) for each in value] if isinstance(value, list) else one_line(value)
        for name, value in values.items()
        if _is_short(value) or (isinstance(value, list) and len(value) <= LONGEST and all(map(_is_short, value)))
    }


def _is_short(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST


def _results(report) -> list[dict[str, Any]]:
    """The last measurements: after healing, if that was measured, else of the conversion."""
    last, text = report.ladder[-1], f"held-out calibration text ({one_line(report.calibration.get('source'))})"
    quality = {row["name"]: row for row in (report.healing or {}).get("quality") or []}
    if "healed" in quality:
        last, text = quality["healed"], "held-out text"
    metrics = [{"type": "kv_cache_ratio", "name": "KV bytes, share of the source's", "value": report.kv["ratio"]}]
    if last["loss"] is not None:
        metrics.append({"type": "loss", "name": "loss, nats per token", "value": last["loss"]})
        if math.isfinite(value := perplexity(last["loss"])):
            metrics.append({"type": "perplexity", "name": "perplexity", "value": value})
    if last["recall"] is not None:
        metrics.append({"type": "recall", "name": "recall of planted keys", "value": last["recall"]})
    rounded = [{**metric, "value": round(metric["value"], 6)} for metric in metrics]
    task = {"type": "text-generation", "name": "Text generation"}
    return [{"task": task, "dataset": {"type": "text", "name": text}, "metrics": rounded}]
