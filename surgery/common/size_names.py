"""Common names for the size entries of a config."""

from __future__ import annotations

from typing import Any

SIZE_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
"""Common config keys by GPT-2's keys."""


def with_size_names(config: dict[str, Any]) -> dict[str, Any]:
    """Rename GPT-2's size keys of a config.json to the common ones."""
    others = {name: value for name, value in config.items() if name not in SIZE_NAMES}
    return {**{SIZE_NAMES[name]: value for name, value in config.items() if name in SIZE_NAMES}, **others}
