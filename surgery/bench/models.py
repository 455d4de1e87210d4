"""Models of random weights for `surgery bench decode`: a named shape, and what conversions make of it.

Times and memory do not depend on what weights say, so nothing is converted: the converted model's config is written as
a conversion would, and filled at random on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from surgery import model as own_model
from surgery.architectures.deepseek_v3 import StockMLA
from surgery.architectures.neutral_norm import neutral_norm
from surgery.architectures.spec import MLASpec
from surgery.bench.convert import SHAPES
from surgery.common.errors import SurgeryError
from surgery.families import head_shape

TINY = {
    "tiny": {
        **SHAPES["llama3-1b"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 128,
        "dtype": "float32",
    }
}
"""For machines without a GPU: to see that everything runs."""

DECODE_SHAPES = {**SHAPES, **TINY}


def source_config(shape: str) -> PreTrainedConfig:
    """The config of a named shape.

    Raises:
        SurgeryError: there is no such shape.
    """
    if shape not in DECODE_SHAPES:
        raise SurgeryError(f"{shape}: no folder, and no shape either: choose {', '.join(DECODE_SHAPES)}")
    config = dict(DECODE_SHAPES[shape])
    return CONFIG_MAPPING[config.pop("model_type")](**config)


def stock_mla(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """As `surgery convert --to mla` writes it: a dense `deepseek_v3`."""
    heads, kv_heads, head_dim = head_shape(config)
    layers, dtype = config.num_hidden_layers, torch.bfloat16
    spec = MLASpec(
        heads=heads,
        kv_heads=kv_heads,
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
    )
    plain = StockMLA(spec, neutral_norm("tiny", rank, dtype)).config(config.to_dict())
    plain.pop("model_type"), plain.pop("architectures")
    return CONFIG_MAPPING["deepseek_v3"](**plain)


def own_mla(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """The same in the project's own class."""
    entry = {
        "kind": "latent",
        "kv_lora_rank": rank,
        "rope_inv_freq": _frequencies(rope_dim).tolist(),
        "key_norm_eps": None,
    }
    return _own(config, entry)


def low_rank(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """One latent of as many numbers in all, from which keys and values of every KV head are rebuilt."""
    heads = list(range(head_shape(config)[1]))
    block = {"rank": rank + rope_dim, "keys": heads, "values": heads}
    entry = {"kind": "low_rank", "blocks": [block], "shared_layers": 0, "shared_rank": 0, "sinks": 0, "window": 0}
    return _own(config, entry)


def fewer_heads(config: PreTrainedConfig, rank: int, rope_dim: int) -> PreTrainedConfig:
    """Half of the KV heads."""
    plain = {**config.to_dict(), "num_key_value_heads": max(1, head_shape(config)[1] // 2)}
    return CONFIG_MAPPING[plain.pop("model_type")](**plain)


STRUCTURES: dict[str, Callable[[PreTrainedConfig, int, int], PreTrainedConfig]] = {
    "mla": stock_mla,
    "mla-own": own_mla,
    "lowrank": low_rank,
    "gqa": fewer_heads,
}
"""What `--to` can name, from the source's config, rank and rotated numbers."""


def random_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """A model with weights from N(0, 0.02), made on the device in the config's dtype."""
    own_model.register()
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else getattr(torch, config.dtype or "bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
    model.tie_weights()
    _refill_buffers(model)
    return model.eval()


def _own(config: PreTrainedConfig, entry: dict[str, Any]) -> PreTrainedConfig:
    entries = [dict(entry) for _ in range(config.num_hidden_layers)]
    return own_model.SurgeryConfig.from_base(config, entries)


def _frequencies(rope_dim: int) -> torch.Tensor:
    """Of default RoPE, radians per token [ρ/2]."""
    return 10_000.0 ** -(torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)


@torch.no_grad()
def _refill_buffers(model: PreTrainedModel) -> None:
    """Buffers hold nothing after `to_empty`: those of rotations are computed by their own classes again.

    Raises:
        SurgeryError: a class does not.
    """
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            if hasattr(module, "initialize_weights"):
                module.initialize_weights()
            else:
                model._init_weights(module)
    for name, buffer in model.named_buffers():
        if not buffer.isfinite().all():
            raise SurgeryError(f"{type(model).__name__}: {name} cannot be computed without a checkpoint")
