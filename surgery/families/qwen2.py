"""Qwen2 and Qwen2.5: biases on queries, keys and values; optional sliding windows in some layers."""

from surgery.families.base import Family, layer_types_window

QWEN2 = Family(model_type="qwen2", window=layer_types_window)
