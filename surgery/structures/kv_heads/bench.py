"""The config of a model of random weights, as a conversion would write it."""

from __future__ import annotations

import transformers
from transformers import PreTrainedConfig

from surgery.families import head_shape


def half_the_heads(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """Half of the KV heads."""
    plain = {**config.to_dict(), "num_key_value_heads": max(1, head_shape(config)[1] // 2)}
    return transformers.CONFIG_MAPPING[plain.pop("model_type")](**plain)
