"""KV bytes per token of sources and of what conversions would make of them, before any work."""

from __future__ import annotations

from typing import Any

from surgery.architectures.own_class import MODEL_TYPE, layer_entries, own_config
from surgery.calibration.settings import ConversionSettings
from surgery.reporting.report import SourceShape
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.source import OwnSource, Source
from surgery.structures.base import LONG, Foreseen


def source_kv_bytes(opened: Source | OwnSource) -> float:
    """Of the source, per token."""
    if isinstance(opened, Source):
        return SourceShape.of(opened).kv_bytes_per_token
    config = opened.reader.config
    held = kv_bytes_of(config, opened.weight_dtype)
    return held(LONG) / LONG if config["model_type"] == MODEL_TYPE else held(1)  # the first lies in every window


def final_config(foreseen: Foreseen, settings: ConversionSettings) -> dict[str, Any]:
    """The config.json of the result, with its ``kv_cache``."""
    if not settings.quantizes:
        return foreseen.config
    return {**own_config(foreseen.config, layer_entries(foreseen.config)), "kv_cache": settings.kv_cache()}


def kv_bytes(
    foreseen: Foreseen, config: dict[str, Any], opened: Source | OwnSource, settings: ConversionSettings
) -> float:
    """Of the result, per token, with its bits."""
    if not config.get("kv_cache"):
        return foreseen.kv_bytes_per_token
    tokens = getattr(settings, "context", None) or LONG
    return kv_bytes_of(config, opened.weight_dtype)(tokens) / tokens
