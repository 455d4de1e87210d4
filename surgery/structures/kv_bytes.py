"""KV bytes per token of sources, computed from their configs."""

from __future__ import annotations

from surgery.architectures.custom_class import MODEL_TYPE
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.source import OwnSource, Source
from surgery.structures.base import LONG


def source_kv_bytes(opened: Source | OwnSource) -> float:
    """Compute the KV bytes per token of the source."""
    config = opened.reader.config
    bytes_at = kv_bytes_of(config, opened.weight_dtype)
    return bytes_at(LONG) / LONG if config["model_type"] == MODEL_TYPE else bytes_at(1)  # 1 token is in every window
