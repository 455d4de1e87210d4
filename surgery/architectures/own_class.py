"""The project's own model class as conversions write it: its config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surgery.families import key_gains
from surgery.families.base import FURTHER

MODEL_TYPE = "surgery"


def own_config(source: dict[str, Any], attention_layers: Sequence[dict | None], **more: Any) -> dict[str, Any]:
    """config.json of the own class, from that of a family's checkpoint or of one that is of the own class already."""
    own = {"architectures": ["SurgeryForCausalLM"], "model_type": MODEL_TYPE}
    if source["model_type"] != MODEL_TYPE:
        own["base_model_type"] = source["model_type"]
    if source.get(FURTHER):
        own[FURTHER] = 0
    return with_auto_map({**source, **own, "attention_layers": list(attention_layers), **more})


def with_auto_map(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of the own class with the `auto_map` that its layers and its cache need."""
    from surgery.model import auto_map

    return {**config, "auto_map": auto_map(config)}


def beside_latents(config: dict[str, Any], entry: dict[str, Any]) -> int:
    """Count the elements per token that a layer caches next to its latents: rotary keys, gains of an exact key norm."""
    gains = 0
    if entry.get("key_norm_eps") is not None:
        gains = key_gains(config["base_model_type"], config["num_key_value_heads"])
    return 2 * len(entry.get("rope_inv_freq", ())) + gains


def layer_entries(config: dict[str, Any]) -> list[dict | None]:
    """What a config.json says of every layer's attention; None is the family's own."""
    return config.get("attention_layers") or [None] * config["num_hidden_layers"]
