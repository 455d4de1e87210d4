"""KV bytes of a checkpoint, from its config.json: what every report, budget and verification predicts them by."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Protocol

import torch
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from surgery.checkpoint.config_file import arguments
from surgery.checkpoint.kv_widths import kv_widths
from surgery.common.errors import SurgeryError
from surgery.model import SurgeryConfig, SurgeryForCausalLM
from surgery.model.cache_prediction import CachedLayer
from surgery.running.loading import LOADING
from surgery.running.skeleton import skeleton

USEFUL = 4_096, 32_768
"""Tokens of contexts at which a cache is worth making smaller."""


class KVBytes(Protocol):
    """Bytes of the live cache of ``batch`` sequences of ``tokens`` tokens each, windows and all."""

    def __call__(self, tokens: int, batch: int = 1, prompt: int | None = None) -> int:
        """``prompt``: tokens of the first pass, all by default; only a basis of the prompt's own depends on it."""


def kv_bytes_of(config: dict[str, Any], dtype: torch.dtype) -> KVBytes:
    """Predict the KV bytes of the model of a config.json whose weights have this dtype. States are not counted.

    Args:
        config: of any checkpoint that is read or written here, or of a vision-language model around one.

    Raises:
        SurgeryError: the config is impossible.
    """
    text = config.get("text_config")
    if isinstance(text, dict) and text.get("model_type") == SurgeryConfig.model_type:
        config = text
    if config["model_type"] == SurgeryConfig.model_type:
        model = _custom_model(json.dumps(config), dtype)
        return lambda tokens, batch=1, prompt=None: model.kv_cache_bytes(batch, tokens, prompt)
    try:
        layers = _stock_layers(config)
    except LOADING as error:
        raise SurgeryError(f"config.json of {config['model_type']} gives no KV bytes: {error!r}") from None

    def bytes_at(tokens: int, batch: int = 1, prompt: int | None = None) -> int:
        return sum(CachedLayer(layer, batch, 1, width, 0, dtype).held(tokens) for layer, width in layers)

    return bytes_at


def kv_shares(
    config: dict[str, Any], dtype: torch.dtype, source: dict[str, Any], source_dtype: torch.dtype, limit: int
) -> dict[str, float]:
    """Predict KV bytes as a share of the source's at 4k and 32k tokens, as far as the model takes them, and at its
    limit.

    Args:
        config: config.json of the result, and ``source`` of what it is made of.
        dtype: of its weights, and ``source_dtype`` of the source's.
        limit: tokens that the model takes.
    """
    bytes_at, source_at = kv_bytes_of(config, dtype), kv_bytes_of(source, source_dtype)
    lengths = [*(tokens for tokens in USEFUL if tokens < limit), limit]
    return {str(tokens): bytes_at(tokens) / source_at(tokens) for tokens in lengths}


@lru_cache(maxsize=32)  # plans and forecasts ask again and again of one config
def _custom_model(config: str, dtype: torch.dtype) -> SurgeryForCausalLM:
    return skeleton(json.loads(config), dtype)


def _stock_layers(config: dict[str, Any]) -> list[tuple[CacheLayerMixin, int]]:
    """Empty cache layers and their elements per token; a class that transformers does not know has no windows."""
    if config["model_type"] not in CONFIG_MAPPING:
        return [(DynamicLayer(), width) for width in kv_widths(config)]
    whole = CONFIG_MAPPING[config["model_type"]](**arguments(config)).get_text_config(decoder=True)
    layers = zip(DynamicCache(config=whole).layers, kv_widths(whole.to_dict()), strict=True)
    return [(layer, width) for layer, width in layers if width]  # without those that keep a state
