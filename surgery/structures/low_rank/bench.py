"""The config of a model of random weights, as a conversion would write it."""

from __future__ import annotations

from transformers import PreTrainedConfig

from surgery.families import head_shape
from surgery.model.configuration_surgery import SurgeryConfig
from surgery.model.low_rank_entry import Block, LowRankEntry


def one_latent(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """One latent of as many numbers in all, from which keys and values of every KV head are rebuilt."""
    heads = tuple(range(head_shape(config)[1]))
    entry = LowRankEntry(blocks=(Block(rank + rope_dim, heads, heads),))
    return SurgeryConfig.from_base(config, [entry.to_entry() for _ in range(config.num_hidden_layers)])
