"""Mistral: Llama's shapes; version 0.1 has a sliding window in all layers. Mixtral: experts, which stay unchanged.

Ministral 8B has windows in some layers; Ministral 3 (arXiv:2601.08584) scales queries by position.
"""

from surgery.families.base import Family, layer_types_window, uniform_window


def first_scaled(config) -> int | None:
    """Return n, the first position with a scaled query: queries are multiplied by 1 + β log(1 + ⌊position / n⌋)."""
    return config.rope_parameters["original_max_position_embeddings"]


MISTRAL = Family(model_type="mistral", window=uniform_window)
MIXTRAL = Family(model_type="mixtral", window=uniform_window, experts=True)
MINISTRAL = Family(model_type="ministral", window=layer_types_window)
MINISTRAL3 = Family(
    model_type="ministral3",
    window=uniform_window,
    first_scaled=first_scaled,
    extra_parts="position-dependent query scaling",
)
