"""KV bytes of a checkpoint, from its config.json: what every report, budget and verification predicts them by."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from surgery.checkpoint.config_file import arguments
from surgery.checkpoint.kv_widths import kv_widths
from surgery.common.errors import SurgeryError
from surgery.model.cache_layer import CachedLayer
from surgery.model.configuration_surgery import SurgeryConfig
from surgery.model.converted_decoder import cached_layers
from surgery.model.parts import parts_of
from surgery.running.loading import LOADING
from surgery.running.plain_decoder import PlainConvertedConfig, plain_config, plain_converted_config

WINDOWLESS = ("deepseek_v3",)
"""Classes of transformers whose layers never have windows; one that it does not know has none either."""
USEFUL = 4_096, 32_768
"""Tokens of contexts at which a cache is worth making smaller."""


class KVBytes(Protocol):
    """Bytes of the live cache of ``batch`` sequences of ``tokens`` tokens each, windows and all."""

    def __call__(self, tokens: int, batch: int = 1) -> int:
        """``prompt``: tokens of the first pass, all by default; only a basis of the prompt's own depends on it."""


def kv_bytes_of(config: dict[str, Any], dtype: torch.dtype) -> KVBytes:
    """Predict the KV bytes of the model of a config.json whose weights have this dtype. States are not counted.

    Raises SurgeryError: the config is impossible.
    """
    text = config.get("text_config")
    if isinstance(text, dict) and text.get("model_type") == SurgeryConfig.model_type:
        config = text
    if config["model_type"] == SurgeryConfig.model_type:
        custom = _custom_config(json.dumps(config))
        return lambda tokens, batch=1: kv_cache_bytes(custom, batch, tokens, dtype)
    try:
        layers = _stock_layers(config)
    except LOADING as error:
        raise SurgeryError(f"config.json of {config['model_type']}: cannot compute KV bytes ({error!r})") from None

    def bytes_at(tokens: int, batch: int = 1) -> int:
        return sum(CachedLayer(layer, batch, 1, width, 0, dtype).held(tokens) for layer, width in layers)

    return bytes_at


def kv_shares(
    config: dict[str, Any], dtype: torch.dtype, source: dict[str, Any], source_dtype: torch.dtype, limit: int
) -> dict[str, float]:
    """Predict KV bytes of a result as a share of the source's at 4k, 32k and the limit of tokens."""
    bytes_at, source_at = kv_bytes_of(config, dtype), kv_bytes_of(source, source_dtype)
    lengths = [*(tokens for tokens in USEFUL if tokens < limit), limit]
    return {str(tokens): bytes_at(tokens) / source_at(tokens) for tokens in lengths}


def kv_cache_bytes(config: SurgeryConfig | PlainConvertedConfig, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Return what `kv_cache_bytes` of a model of the custom model class returns, without the model."""
    return sum(layer.held(tokens) for layer in cached_layers(config, batch, dtype) if layer is not None)


@lru_cache(maxsize=32)  # plans and forecasts ask again and again of one config
def _custom_config(config: str) -> SurgeryConfig | PlainConvertedConfig:
    """The configuration of a config.json, checked by the code of its parts."""
    values = json.loads(config)
    try:
        for name in parts_of({"base_model_type": None, **values}):
            import_module(f"surgery.model.{name}")
        return plain_converted_config(values) or SurgeryConfig(**arguments(values))
    except LOADING as error:
        raise SurgeryError(str(error) or repr(error)) from None


def _stock_layers(config: dict[str, Any]) -> list[tuple[CacheLayerMixin, int]]:
    """Empty cache layers and their elements per token."""
    kind = config["model_type"]
    whole = plain_config(config)
    if whole is None and (kind in WINDOWLESS or kind not in transformers.CONFIG_MAPPING):
        return [(DynamicLayer(), width) for width in kv_widths(config)]
    whole = whole or transformers.CONFIG_MAPPING[kind](**arguments(config))
    whole = whole.get_text_config(decoder=True)
    layers = zip(DynamicCache(config=whole).layers, kv_widths(whole.to_dict()), strict=True)
    return [(layer, width) for layer, width in layers if width]  # without those that keep a state
