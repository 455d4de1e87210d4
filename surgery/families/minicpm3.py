"""MiniCPM3: DeepSeek-V2's attention with half-split rotary pairs; multipliers of embeddings, residuals and logits."""

import math

from surgery.families.latent_family import LatentFamily


def _residual_scale(single, config, layer: int) -> None:
    single.scale_depth = config.scale_depth / math.sqrt(config.num_hidden_layers)  # its class divides by √layers


MINICPM3 = LatentFamily(
    model_type="minicpm3",
    neighbors=lambda config: False,
    embedding_scale=lambda config: config.scale_emb,
    expert_layers=_residual_scale,
)
