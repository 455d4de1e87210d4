"""Config of a converted model, for benchmarks with random weights."""

from __future__ import annotations

from transformers import PreTrainedConfig

from surgery.families import head_shape
from surgery.model.configuration_surgery import SurgeryConfig
from surgery.model.low_rank_entry import Block, LowRankEntry


def one_latent(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """Return a config with one latent of ``rank + rope_dim`` elements for keys and values of all KV heads."""
    heads = tuple(range(head_shape(config)[1]))
    entry = LowRankEntry(blocks=(Block(rank + rope_dim, heads, heads),))
    return SurgeryConfig.from_base(config, [entry.to_entry() for _ in range(config.num_hidden_layers)])
