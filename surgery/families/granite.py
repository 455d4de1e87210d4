"""Granite 3, with experts or none, and 4: Llama's attention with a scale from the config, between multipliers.

Layers of Granite 4 have attention or a Mamba 2 state, which stays unchanged; models with Mamba layers have no RoPE.
"""

from dataclasses import replace

from surgery.families.base import Family

GRANITE = Family(
    model_type="granite",
    scale=lambda config: config.attention_multiplier,
    embedding_scale=lambda config: config.embedding_multiplier,
    extra_parts="multipliers of embeddings, residuals and logits",
)

GRANITE_MOE = replace(GRANITE, model_type="granitemoe", experts=True)
GRANITE_HYBRID = replace(
    GRANITE_MOE,
    model_type="granitemoehybrid",
    rotates=lambda config, layer: config.position_embedding_type == "rope",
    extra_parts="multipliers of embeddings, residuals and logits, and recurrent layers",
)
