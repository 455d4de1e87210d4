"""Stock classes some of whose layers have a sliding window, which a model's weights go into as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surgery.common.errors import SurgeryError

CARRIERS = {"llama": "ministral", "mistral": "ministral", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Carriers by the source's ``model_type``; Ministral's layers are Llama's and Mistral's, without biases."""
CLASSES = {"ministral": "MinistralForCausalLM"}
OF_LLAMA = ("pretraining_tp", "attention_bias", "mlp_bias")
REASON = "stock {} has layers with a sliding window and layers with none"


def sliding_config(source: dict[str, Any], streams: Sequence[bool], window: int) -> dict[str, Any]:
    """config.json of the stock class, of a source without windows.

    Args:
        streams: of every layer.
        window: tokens that a query of such a layer sees, its own among them.

    Raises:
        SurgeryError: no stock class has the source's layers next to such with a window.
    """
    carrier = CARRIERS.get(source["model_type"])
    if carrier is None:
        raise SurgeryError(
            f"granularity layer: no stock class is known for {source['model_type']} with windows in some layers "
            f"(it is for {', '.join(CARRIERS)}); leave it out",
            setting="granularity",
        )
    if carrier != source["model_type"] and (source.get("attention_bias") or source.get("mlp_bias")):
        raise SurgeryError(
            f"granularity layer: {carrier} has no biases, and the source has; leave it out", setting="granularity"
        )
    fields = {name: value for name, value in source.items() if carrier == source["model_type"] or name not in OF_LLAMA}
    config = {
        **fields,
        "model_type": carrier,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in streams],
        "sliding_window": window,
    }
    if carrier in CLASSES:
        config["architectures"] = [CLASSES[carrier]]
    else:
        config["use_sliding_window"] = True
    return config
