"""Qwen3-MoE: Qwen3's attention; experts in every ``decoder_sparse_step``-th layer outside ``mlp_only_layers``."""

from surgery.families.base import Family, uniform_window


def _expert_layers(single, config, layer: int) -> None:
    dense = layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step
    single.mlp_only_layers = [0] if dense else []
    single.decoder_sparse_step = 1


QWEN3_MOE = Family(
    model_type="qwen3_moe", qk_norm=True, window=uniform_window, experts=True, expert_layers=_expert_layers
)
