"""KV bytes per token of sources and of what conversions would make of them, before any work."""

from __future__ import annotations

from typing import Any

from surgery.architectures.own_class import MODEL_TYPE, layer_entries, own_config
from surgery.calibration.settings import ConversionSettings
from surgery.reporting.report import SourceShape
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.source import OwnSource, Source
from surgery.structures.base import LONG, Forecast


def source_kv_bytes(opened: Source | OwnSource) -> float:
    """Return the KV bytes per token of the source."""
    if isinstance(opened, Source):
        return SourceShape.of(opened).kv_bytes_per_token
    config = opened.reader.config
    bytes_at = kv_bytes_of(config, opened.weight_dtype)
    return bytes_at(LONG) / LONG if config["model_type"] == MODEL_TYPE else bytes_at(1)  # inside every window


def final_config(forecast: Forecast, settings: ConversionSettings) -> dict[str, Any]:
    """The config.json of the result, with its ``kv_cache``."""
    if not settings.quantizes:
        return forecast.config
    return {**own_config(forecast.config, layer_entries(forecast.config)), "kv_cache": settings.kv_cache()}


def kv_bytes(
    forecast: Forecast, config: dict[str, Any], opened: Source | OwnSource, settings: ConversionSettings
) -> float:
    """Return the KV bytes per token of the result, with its bits."""
    if not config.get("kv_cache"):
        return forecast.kv_bytes_per_token
    tokens = getattr(settings, "context", None) or LONG
    return kv_bytes_of(config, opened.weight_dtype)(tokens) / tokens
