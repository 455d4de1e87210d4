"""Gemma 3, text only: norm weights of 1 + w, a scale from the config, sliding-window layers with their own RoPE."""

from surgery.families.base import Family, layer_types_window

GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    qk_norm=True,
    norm_offset=1.0,
    scale=lambda config: config.query_pre_attn_scalar**-0.5,
    embedding_scale=lambda config: config.hidden_size**0.5,
    window=layer_types_window,
    extra_parts="norms after attention and feed-forward layers",
)
