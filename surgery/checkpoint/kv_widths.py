"""KV-cache elements per token and layer, from a config.json without a model."""

from __future__ import annotations

from typing import Any

from surgery.common.size_names import with_size_names


def kv_widths(config: dict[str, Any]) -> list[int]:
    """Return the elements that each layer of a stock model class caches per token; 0 for linear attention and Mamba.

    Raises KeyError: a size is missing.
    """
    config = with_size_names(config)
    layers = config["num_hidden_layers"]
    if config.get("kv_lora_rank"):
        return [config["kv_lora_rank"] + config["qk_rope_head_dim"]] * layers
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    width = 2 * (config.get("num_key_value_heads") or heads) * head_dim
    if types := config.get("layer_types"):
        return [0 if kind in ("linear_attention", "mamba") else width for kind in types]
    interval = config.get("full_attention_interval", 1)  # Qwen3-Next configs may have this instead of layer_types
    return [0 if (layer + 1) % interval else width for layer in range(layers)]
