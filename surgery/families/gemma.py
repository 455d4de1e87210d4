"""Gemma 1 and CodeGemma: Llama's attention; norm weights of 1 + w and scaled embeddings around it."""

from surgery.families.base import Family

GEMMA = Family(
    model_type="gemma",
    norm_offset=1.0,
    embedding_scale=lambda config: config.hidden_size**0.5,
    extra_parts="norms of 1 + w and scaled embeddings",
)
