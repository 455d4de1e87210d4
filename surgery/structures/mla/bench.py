"""Configs of a model of random weights, as a conversion would write them."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedConfig

from surgery.architectures.deepseek_v3 import StockMLA
from surgery.architectures.neutral_norm import neutral_norm
from surgery.architectures.spec import MLASpec
from surgery.families import head_shape
from surgery.model.configuration_surgery import SurgeryConfig
from surgery.model.latent_entry import LatentEntry
from surgery.model.quantized_latent_entry import QuantizedLatentEntry


def stock_mla(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """Return the dense `deepseek_v3` config that `surgery convert --to mla` writes."""
    heads, _, head_dim = head_shape(config)
    layers, dtype = config.num_hidden_layers, torch.bfloat16
    spec = MLASpec(
        heads=heads,
        head_dim=head_dim,
        value_dim=head_dim,
        hidden=config.hidden_size,
        ranks=(rank,) * layers,
        inv_freq=(_frequencies(rope_dim),) * layers,
        dtype=dtype,
        query_bias=False,
        latent_bias=False,
        output_bias=False,
        key_norm_eps=None,
        windows=(None,) * layers,
        input_lengths=(config.hidden_size**0.5,) * layers,
    )
    plain = StockMLA(spec, neutral_norm("tiny", rank, dtype)).config(config.to_dict())
    plain.pop("model_type"), plain.pop("architectures")
    return transformers.CONFIG_MAPPING["deepseek_v3"](**plain)


def own_mla(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """Return the same config for the custom model class."""
    frequencies = tuple(_frequencies(rope_dim).tolist())
    entry = LatentEntry(kv_lora_rank=rank, rope_inv_freq=frequencies, key_norm_eps=None)
    return SurgeryConfig.from_base(config, [entry.to_entry() for _ in range(config.num_hidden_layers)])


def mla_in_bits(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """Return the config of packed rows: 4 bits per channel, all tokens but the first four."""
    frequencies = tuple(_frequencies(rope_dim).tolist())
    runs = {"latent_runs": (("4+4", rank // 2),), "rope_runs": (("4+4", rope_dim // 2),)}
    entry = QuantizedLatentEntry(
        kv_lora_rank=rank, rope_inv_freq=frequencies, key_norm_eps=None, first_tokens=4, **runs
    )
    return SurgeryConfig.from_base(config, [entry.to_entry() for _ in range(config.num_hidden_layers)])


def _frequencies(rope_dim: int) -> torch.Tensor:
    """Return the frequencies of default RoPE, radians per token [ρ/2]."""
    return 10_000.0 ** -(torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)
