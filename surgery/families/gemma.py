"""Gemma: norm weights of 1 + w and scaled embeddings around Llama's attention.

Gemma 2 and 3 have a scale from the config and sliding windows in some layers. Gemma 2 caps attention and output logits;
Gemma 3, text only, has a q/k-norm, and windows with their own RoPE.
"""

from dataclasses import replace

from surgery.families.base import Family, layer_types_window

GEMMA = Family(
    model_type="gemma",
    norm_offset=1.0,
    embedding_scale=lambda config: config.hidden_size**0.5,
    extra_parts="norms of 1 + w and scaled embeddings",
)
GEMMA3_TEXT = replace(
    GEMMA,
    model_type="gemma3_text",
    qk_norm=True,
    scale=lambda config: config.query_pre_attn_scalar**-0.5,
    window=layer_types_window,
    extra_parts="norms after attention and feed-forward layers",
)
GEMMA2 = replace(
    GEMMA3_TEXT,
    model_type="gemma2",
    qk_norm=False,
    softcap=lambda config: config.attn_logit_softcapping,
    eager=True,  # transformers 5.19 uses SDPA, which has no cap
    extra_parts="logit softcaps, and norms after attention and feed-forward layers",
)
