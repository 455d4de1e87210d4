"""Qwen3: RMS norms on each head's queries and keys, head_dim apart from hidden size."""

from surgery.families.base import Family, layer_types_window

QWEN3 = Family(model_type="qwen3", qk_norm=True, window=layer_types_window)
