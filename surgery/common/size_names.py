"""Sizes of a model under the names that most families have for them."""

from __future__ import annotations

from typing import Any

SIZE_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
"""Names of sizes by GPT-2's names."""


def with_size_names(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json in which sizes have these names alone."""
    others = {name: value for name, value in config.items() if name not in SIZE_NAMES}
    return {**{SIZE_NAMES[name]: value for name, value in config.items() if name in SIZE_NAMES}, **others}
