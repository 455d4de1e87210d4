"""Ministral 8B: Mistral with windows in some layers; Ministral 3 (arXiv:2601.08584): queries scaled by position."""

from surgery.families.base import Family, layer_types_window, uniform_window


def first_scaled(config) -> int | None:
    """Return n, the first position with a scaled query: queries are multiplied by 1 + β log(1 + ⌊position / n⌋)."""
    return config.rope_parameters["original_max_position_embeddings"]


MINISTRAL = Family(model_type="ministral", window=layer_types_window)

MINISTRAL3 = Family(
    model_type="ministral3",
    window=uniform_window,
    first_scaled=first_scaled,
    extra_parts="position-dependent query scaling",
)
