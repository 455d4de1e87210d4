"""Per-parameter learning-rate multipliers of converted checkpoints.

Conversions turn the latent norm of stock MLA into the identity (:mod:`.neutral_norm`). Training must freeze its weight,
a constant channel, and the columns that read it, since one step would dominate the output. Weights of a tiny latent
move in proportion to its scale, and so do weights that were enlarged to compensate for smaller inputs.

Packed rows have a step per channel, of any size. Weights that produce a channel move in proportion to its step. Weights
that read channels are frozen: the adjacent query and output projections learn as much.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from surgery.architectures.custom_class import layer_entries
from surgery.architectures.deepseek_v3 import INPUT_NORM, MODEL_TYPE
from surgery.architectures.neutral_norm import OLD_SCALE, recognized_norm
from surgery.checkpoint import CheckpointReader
from surgery.families.base import ATTENTION_PREFIX

ROW_READERS = ("query_up", "key_up", "value_up", "shared_down")
STEPS_OF_INPUT = 1e-3
"""A channel's multiplier is its quantization step / (this × input channels). At a learning rate of 1e-4 and inputs of
size 1, a training step moves a value by at most a tenth of its quantization step. Tested on the demo model only."""


FROZEN = {"rows": 0.0}


def lr_multipliers(reader: CheckpointReader) -> dict[str, dict[str, Any]]:
    """Return the factors for `surgery.training.lr_multipliers` by parameter name; empty if none is restricted."""
    if reader.config.get("attention_layers"):
        return _packed_rows(reader)
    if MODEL_TYPE not in (reader.config.get("model_type"), reader.config.get("base_model_type")):
        return {}
    rules: dict[str, dict[str, Any]] = {}
    width = reader.config["kv_lora_rank"]
    for layer in range(reader.config["num_hidden_layers"]):
        prefix = ATTENTION_PREFIX.format(layer=layer)
        weight, bias = prefix + "kv_a_proj_with_mqa.weight", prefix + "kv_a_proj_with_mqa.bias"
        biases = reader.tensor(bias)[:width] if bias in reader else None
        norm = recognized_norm(reader.tensor(prefix + "kv_a_layernorm.weight"), biases)
        if norm is None:  # a real norm, as in DeepSeek's own models
            continue
        rules[prefix + "kv_a_layernorm.weight"] = FROZEN
        larger, outputs = 1.0, reader.info(weight).shape[0]
        if norm.extra:
            before = width - norm.extra  # the constant channel
            rules[weight] = rules[bias] = {"rows": _split(outputs, before, width, 0.0)}
            rules[prefix + "kv_b_proj.weight"] = {"columns": _split(width, before, width, 0.0)}
        else:
            latents = {"rows": _split(outputs, 0, width, norm.scale)}
            rules |= {name: latents for name in (weight, bias) if name in reader}
            if norm.scale != OLD_SCALE:
                larger = _tiny_latent(reader, layer, width, rules)
        rules |= _query_latent(reader, prefix, larger)
    return rules


def _split(size: int, start: int, stop: int, inside: float, outside: float = 1.0) -> list[float]:
    """Return `size` factors: ``inside`` from ``start`` to ``stop``, ``outside`` elsewhere."""
    return [inside if start <= index < stop else outside for index in range(size)]


def _packed_rows(reader: CheckpointReader) -> dict[str, dict[str, Any]]:
    """Return the rules for layers that cache packed rows; factors are powers of two."""
    rules: dict[str, dict[str, Any]] = {}
    for layer, entry in enumerate(layer_entries(reader.config)):
        if not entry.quantizes:
            continue
        prefix = ATTENTION_PREFIX.format(layer=layer)
        steps = reader.tensor(prefix + "quantizer.step").double() / (STEPS_OF_INPUT * reader.config["hidden_size"])
        moving = {"rows": steps.log2().round().exp2().tolist()}
        makers = (prefix + "kv_down.weight", prefix + "kv_down.bias")
        rules |= {name: moving for name in makers if name in reader}
        readers = tuple(prefix + name for name in ROW_READERS)
        rules |= {name: FROZEN for name in reader.names() if name.startswith(readers)}
    return rules


def _tiny_latent(reader: CheckpointReader, layer: int, width: int, rules: dict[str, dict[str, Any]]) -> float:
    """Add the rules for the weights of a tiny latent; return the factor of the queries, which read the same inputs.

    Factors are ratios of weight sizes, so they need no tuning between producers and readers of a latent.
    """
    prefix = ATTENTION_PREFIX.format(layer=layer)
    weight = prefix + "kv_a_proj_with_mqa.weight"
    query = prefix + ("q_b_proj.weight" if prefix + "q_b_proj.weight" in reader else "q_proj.weight")
    larger = _ratio(reader.tensor(query), reader.tensor(prefix + "o_proj.weight"))
    smaller = _ratio(reader.tensor(weight)[:width], reader.tensor(prefix + "kv_b_proj.weight"))
    rules[INPUT_NORM.format(layer=layer)] = {"rows": 1 / larger}
    rules[weight] = {"rows": _split(reader.info(weight).shape[0], 0, width, smaller, larger)}
    rules[query] = {"rows": larger}
    return larger


def _ratio(tensor: Tensor, other: Tensor) -> float:
    """Return the ratio of two RMS values, rounded to a power of two; 1 if either is 0."""
    sizes = [float(each.double().square().mean().sqrt()) for each in (tensor, other)]
    return 2.0 ** round(math.log2(sizes[0] / sizes[1])) if all(sizes) else 1.0


def _query_latent(reader: CheckpointReader, prefix: str, larger: float) -> dict[str, dict[str, Any]]:
    """Return the rules for the query latent [x ; 1], which gives stock queries a bias; empty without one.

    Its down projection and norm only copy the inputs, so they are frozen; ``q_b_proj`` learns, with the factor
    ``larger``.
    """
    names = [prefix + name for name in ("q_a_proj.weight", "q_a_proj.bias", "q_a_layernorm.weight")]
    if not all(name in reader for name in names):
        return {}
    weight, constant = reader.tensor(names[0]), float(reader.tensor(names[1])[-1])
    scale, channels = float(weight[0, 0]), weight.shape[1]
    if not torch.equal(weight, torch.eye(channels + 1, channels, dtype=weight.dtype) * scale):
        return {}
    norm = reader.tensor(names[2])
    factor = float(norm[0]) * scale / (float(norm[-1]) * constant)  # ratio of inputs to the constant, after the norm
    columns = _split(channels + 1, channels, channels + 1, factor / larger)
    return {**dict.fromkeys(names, FROZEN), prefix + "q_b_proj.weight": {"rows": larger, "columns": columns}}
