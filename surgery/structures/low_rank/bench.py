"""The config of a model of random weights, as a conversion would write it."""

from __future__ import annotations

from transformers import PreTrainedConfig

from surgery.families import head_shape
from surgery.model import SurgeryConfig


def one_latent(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """One latent of as many numbers in all, from which keys and values of every KV head are rebuilt."""
    heads = list(range(head_shape(config)[1]))
    block = {"rank": rank + rope_dim, "keys": heads, "values": heads}
    entry = {"kind": "low_rank", "blocks": [block], "shared_layers": 0, "shared_rank": 0, "sinks": 0, "window": 0}
    return SurgeryConfig.from_base(config, [dict(entry) for _ in range(config.num_hidden_layers)])
