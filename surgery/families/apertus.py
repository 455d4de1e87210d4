"""Apertus: per-head RMS norms on queries and keys; feed-forward layers without gates, other names of norms."""

from surgery.families.base import Family

APERTUS = Family(
    model_type="apertus",
    qk_norm=True,
    input_norm="attention_layernorm",
    extra_parts="feed-forward layers without gates",
)
