"""Stock classes that have sliding windows in some layers and take the source's weights unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surgery.common.errors import SurgeryError

CARRIERS = {"llama": "ministral", "mistral": "ministral", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Target ``model_type`` by the source's; Ministral's layers are Llama's and Mistral's, without biases."""
CLASSES = {"ministral": "MinistralForCausalLM"}
OF_LLAMA = ("pretraining_tp", "attention_bias", "mlp_bias")
REASON = "stock {} has layers with and without a sliding window"


def sliding_config(source: dict[str, Any], streams: Sequence[bool], window: int) -> dict[str, Any]:
    """Return config.json of the stock class for a source without windows.

    Args:
        streams: for each layer, whether it gets a sliding window.
        window: sliding window in tokens, the query's own included.

    Raises:
        SurgeryError: no stock class has the source's layers with and without a window.
    """
    carrier = CARRIERS.get(source["model_type"])
    if carrier is None:
        raise SurgeryError(
            f"granularity layer: no stock class of {source['model_type']} has windows in some layers "
            f"(supported: {', '.join(CARRIERS)}); leave it out",
            setting="granularity",
        )
    if carrier != source["model_type"] and (source.get("attention_bias") or source.get("mlp_bias")):
        raise SurgeryError(
            f"granularity layer: {carrier} does not support the source's biases; leave it out", setting="granularity"
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
