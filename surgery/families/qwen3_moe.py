"""Qwen2-MoE, Qwen3-MoE: Qwen2's or Qwen3's attention; experts in every ``decoder_sparse_step``-th layer but some."""

from dataclasses import replace

from surgery.families.base import Family, uniform_window
from surgery.families.qwen2 import QWEN2


def _expert_layers(single, config, layer: int) -> None:
    dense = layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step
    single.mlp_only_layers = [0] if dense else []
    single.decoder_sparse_step = 1


QWEN3_MOE = Family(
    model_type="qwen3_moe", qk_norm=True, window=uniform_window, experts=True, expert_layers=_expert_layers
)
QWEN2_MOE = replace(QWEN2, model_type="qwen2_moe", experts=True, expert_layers=_expert_layers)
