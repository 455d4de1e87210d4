"""KV bytes per token of sources and of what conversions would make of them, before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from surgery.architectures.own_class import MODEL_TYPE, layer_entries, own_config
from surgery.calibration.settings import ConversionSettings
from surgery.reporting.report import SourceShape
from surgery.running.skeleton import skeleton
from surgery.running.source import OwnSource, Source
from surgery.structures.base import LONG, Foreseen


def source_kv_bytes(opened: Source | OwnSource) -> float:
    """Of the source, per token."""
    if isinstance(opened, Source):
        return SourceShape.of(opened).kv_bytes_per_token
    config, dtype = opened.reader.config, opened.weight_dtype
    if config["model_type"] == MODEL_TYPE:
        return skeleton(config, dtype).kv_cache_bytes(1, LONG) / LONG
    return (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * opened.layers * dtype.itemsize


def cache_bytes_of(config: dict[str, Any], dtype: torch.dtype) -> Callable[[int, int], int]:
    """Bytes of the live cache of so many sequences of so many tokens each, windows and all.

    Args:
        config: config.json of a family, of MLA or of the own class.
    """
    if config["model_type"] != MODEL_TYPE:
        config = own_config(config, layer_entries(config))
    return skeleton(config, dtype).kv_cache_bytes


def final_config(foreseen: Foreseen, settings: ConversionSettings) -> dict[str, Any]:
    """The config.json of the result, with its ``kv_cache``."""
    if not settings.quantizes:
        return foreseen.config
    return {**own_config(foreseen.config, layer_entries(foreseen.config)), "kv_cache": settings.kv_cache()}


def kv_bytes(
    foreseen: Foreseen, config: dict[str, Any], opened: Source | OwnSource, settings: ConversionSettings
) -> float:
    """Of the result, per token: with its bits, or of the budget where bits are chosen with the ranks."""
    if not (config.get("kv_cache") and foreseen.sized):
        return foreseen.kv_bytes_per_token
    tokens = getattr(settings, "context", None) or LONG
    return skeleton(config, opened.weight_dtype).kv_cache_bytes(1, tokens) / tokens
