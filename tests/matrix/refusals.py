"""What some models refuse in the matrices over `WRITTEN`: (aspect, model) to words of the one message."""

from shared_caches import FORMS

CROSS_LAYER = (
    *(f"cross_layer_{form}" for form in FORMS),
    "cross_layer_prompt",
    "cross_layer_latent",
    "cross_layer_mla",
)

LOADING: dict[tuple[str, str], str] = {
    ("gradient_checkpointing", name): "without gradient checkpointing" for name in CROSS_LAYER
}
"""Aspects of tests/matrix/test_loading.py."""
