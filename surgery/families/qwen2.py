"""Qwen2 and Qwen2.5: biases on queries, keys and values; sliding windows in some layers where switched on."""

from surgery.families.base import Family, layer_types_window

QWEN2 = Family(model_type="qwen2", window=layer_types_window)
