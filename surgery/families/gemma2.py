"""Gemma 2: soft caps on attention and output logits, norm weights of 1 + w, sliding windows in every other layer."""

from surgery.families.base import Family, layer_types_window

GEMMA2 = Family(
    model_type="gemma2",
    norm_offset=1.0,
    scale=lambda config: config.query_pre_attn_scalar**-0.5,
    softcap=lambda config: config.attn_logit_softcapping,
    eager=True,  # transformers 5.19 uses SDPA, which has no cap
    embedding_scale=lambda config: config.hidden_size**0.5,
    window=layer_types_window,
    extra_parts="logit softcaps, and norms after attention and feed-forward layers",
)
