"""Granite 3: Llama's attention with a scale from the config; multipliers everywhere around it."""

from surgery.families.base import Family

GRANITE = Family(
    model_type="granite",
    scale=lambda config: config.attention_multiplier,
    embedding_scale=lambda config: config.embedding_multiplier,
    mlp_bias=lambda config: bool(config.mlp_bias),
    beside="multipliers of embeddings, residuals and logits",
)
