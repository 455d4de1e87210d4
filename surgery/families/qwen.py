"""Qwen2 and Qwen3: biases on queries, keys and values, or RMS norms per head on queries and keys; optional windows.

The language models of Qwen2.5-VL and Qwen3-VL have M-RoPE: each rotary pair uses one of three positions, the same one
in all heads, so that maps that commute with RoPE also commute with M-RoPE, and merged heads stay exact.
"""

from dataclasses import replace

from surgery.families.base import Family, layer_types_window, uniform_window


def _expert_layers(single, config, layer: int) -> None:
    dense = layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step
    single.mlp_only_layers = [0] if dense else []
    single.decoder_sparse_step = 1


QWEN2 = Family(model_type="qwen2", window=layer_types_window)
QWEN2_MOE = replace(QWEN2, model_type="qwen2_moe", experts=True, expert_layers=_expert_layers)
QWEN2_5_VL_TEXT = replace(QWEN2, model_type="qwen2_5_vl_text", axes=True)
QWEN3 = replace(QWEN2, model_type="qwen3", qk_norm=True)
QWEN3_VL_TEXT = replace(QWEN3, model_type="qwen3_vl_text", axes=True)
QWEN3_MOE = replace(QWEN2_MOE, model_type="qwen3_moe", qk_norm=True, window=uniform_window)
QWEN3_VL_MOE_TEXT = replace(QWEN3_MOE, model_type="qwen3_vl_moe_text", axes=True)
