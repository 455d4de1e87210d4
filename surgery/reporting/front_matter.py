"""YAML front matter of a model card for the hub, with measurements as a model-index.

See https://huggingface.co/docs/hub/model-cards, section on metadata; `model-index` as read by huggingface_hub.
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
"""Maximum characters of an inherited text, and maximum entries of an inherited list."""
LONGEST_HEAD = 2**16
"""Maximum characters of the source's front matter; nothing is inherited from a longer one."""
HERITABLE = ("license", "license_name", "license_link", "language")
"""Metadata keys of the source's card that conversions inherit."""


def front_matter(report, name: str, *, base_model: str | None = None, inherited: dict[str, Any] | None = None) -> str:
    """Render the front matter of a card, enclosed in lines of dashes, with values escaped for YAML.

    ``base_model`` is the source's hub id, by default the report's; ``inherited`` its card's metadata
    (:func:`of_source`).
    """
    base_model = base_model or report.source.get("hub")
    head = {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text" if reads_pictures(report.target) else "text-generation",
        # The hub accepts only hub ids here.
        **({"base_model": one_line(base_model)} if base_model else {}),
        **(inherited or {}),
        "tags": ["model-surgery", one_line(report.target["to"]), "kv-cache-compression"],
        "model-index": [{"name": one_line(name), "results": _results(report)}],
    }
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=math.inf)}---\n"


def reads_pictures(target: dict[str, Any]) -> bool:
    """Return whether a conversion target is a vision-language model, judged by the class that loads it."""
    return PICTURES in str(target["engines"].get("transformers"))


def of_source(folder: Path) -> dict[str, Any]:
    """Return the metadata that a checkpoint inherits from its source's card in the same folder."""
    try:
        head = (folder / SOURCE_CARD).read_text(encoding="utf-8").split("---\n")[1]
        # BaseLoader keeps texts: safe_load raises ValueError for invalid dates, and reads the language `no` as false.
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
    """Build the model-index results; after a healing, losses are those of the healed model, if measured."""
    last, text = report.ladder[-1], f"held-out calibration text ({one_line(report.calibration.get('source'))})"
    if report.healing:
        quality = {row["name"]: row for row in report.healing.get("quality") or []}
        last, text = quality.get("healed", {"loss": None, "recall": None}), "held-out text"
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
