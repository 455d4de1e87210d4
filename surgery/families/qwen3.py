"""Qwen3: per-head RMS norms on queries and keys, head_dim independent of the hidden size."""

from surgery.families.base import Family, layer_types_window

QWEN3 = Family(model_type="qwen3", qk_norm=True, window=layer_types_window)
