"""Tensors that training must leave unchanged or scale, so that a checkpoint's class goes on computing what it is meant
to.

Stock MLA classes normalize the latent, and conversions make that norm the identity (:mod:`.neutral_norm`). Its weight
must not move, nor a channel that is constant, nor what reads it: after the norm it may be in the thousands, and one
step of an optimizer would drown all else. Latents that were scaled down to be small next to the norm's eps must move in
proportion to their size, and so must what is larger where the inputs are smaller.

Packed rows have a step for every channel, of any size. What makes a channel moves in proportion to its step; what reads
channels stays, as the projections of queries and outputs next to it learn as much.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from surgery.architectures.deepseek_v3 import INPUT_NORM, MODEL_TYPE
from surgery.architectures.neutral_norm import OLD_SCALE, NeutralNorm, recognized_norm
from surgery.architectures.own_class import layer_entries
from surgery.checkpoint import CheckpointReader
from surgery.families.base import ATTENTION_PREFIX

ROW_READERS = ("query_up", "key_up", "value_up", "shared_down")
STEPS_OF_INPUT = 1e-3
"""Steps of a channel by which a moved weight may move it, times the input channels: with it a step of training at a
learning rate of 1e-4 moves a value by at most a tenth of its step where inputs have size 1. Tried on the demo model
alone."""


def entry_factors(reader: CheckpointReader) -> dict[str, Any]:
    """Rules for `surgery.training.entry_factors`, by parameter name; empty where all may move freely."""
    if reader.config.get("attention_layers"):
        return _packed_rows(reader)
    if MODEL_TYPE not in (reader.config.get("model_type"), reader.config.get("base_model_type")):
        return {}
    rules: dict[str, Any] = {}
    width = reader.config["kv_lora_rank"]
    for layer in range(reader.config["num_hidden_layers"]):
        prefix = ATTENTION_PREFIX.format(layer=layer)
        weight, bias = prefix + "kv_a_proj_with_mqa.weight", prefix + "kv_a_proj_with_mqa.bias"
        biases = reader.tensor(bias)[:width] if bias in reader else None
        norm = recognized_norm(reader.tensor(prefix + "kv_a_layernorm.weight"), biases)
        if norm is None:  # a norm that does something, as in DeepSeek's own models
            continue
        rules[prefix + "kv_a_layernorm.weight"] = True
        if norm.extra:
            constant = list(range(width - norm.extra, width))
            rules[weight] = rules[bias] = constant
            rules[prefix + "kv_b_proj.weight"] = {"columns": constant}
        else:
            rules |= _tiny_latent(reader, layer, width, norm)
        queries = _query_latent(reader, prefix)
        for name in rules.keys() & queries.keys():
            queries[name] = [rules[name], queries[name]]
        rules |= queries
    return rules


def _packed_rows(reader: CheckpointReader) -> dict[str, Any]:
    """Rules for layers that cache packed rows; factors are powers of two."""
    rules: dict[str, Any] = {}
    for layer, entry in enumerate(layer_entries(reader.config)):
        if not entry.quantizes:
            continue
        prefix = ATTENTION_PREFIX.format(layer=layer)
        steps = reader.tensor(prefix + "quantizer.step").double() / (STEPS_OF_INPUT * reader.config["hidden_size"])
        exponents = steps.log2().round()
        moving = [
            {"rows": (exponents == exponent).nonzero().flatten().tolist(), "factor": 2.0 ** float(exponent)}
            for exponent in exponents.unique()
        ]
        makers = (prefix + "kv_down.weight", prefix + "kv_down.bias")
        rules |= {name: moving for name in makers if name in reader}
        readers = tuple(prefix + name for name in ROW_READERS)
        rules |= {name: True for name in reader.names() if name.startswith(readers)}
    return rules


def _tiny_latent(reader: CheckpointReader, layer: int, width: int, norm: NeutralNorm) -> dict[str, Any]:
    """Rules for what makes a tiny latent, and for what reads inputs that are scaled with it.

    Factors are relations of sizes, so that nothing is to be balanced between what makes and what reads a latent.
    """
    prefix = ATTENTION_PREFIX.format(layer=layer)
    weight, bias = prefix + "kv_a_proj_with_mqa.weight", prefix + "kv_a_proj_with_mqa.bias"
    latents = {"rows": f"0:{width}", "factor": norm.scale}
    rules = {bias: latents} if bias in reader else {}
    if norm.scale == OLD_SCALE:
        return {**rules, weight: latents}
    query = prefix + ("q_b_proj.weight" if prefix + "q_b_proj.weight" in reader else "q_proj.weight")
    larger = _ratio(reader.tensor(query), reader.tensor(prefix + "o_proj.weight"))
    smaller = _ratio(reader.tensor(weight)[:width], reader.tensor(prefix + "kv_b_proj.weight"))
    return {
        **rules,
        INPUT_NORM.format(layer=layer): {"factor": 1 / larger},
        weight: [{"factor": larger}, {**latents, "factor": smaller}],
        query: {"factor": larger},
    }


def _ratio(tensor: Tensor, other: Tensor) -> float:
    """The power of two next to the relation of two root mean squares; 1 where one is 0."""
    sizes = [float(each.double().square().mean().sqrt()) for each in (tensor, other)]
    return 2.0 ** round(math.log2(sizes[0] / sizes[1])) if all(sizes) else 1.0


def _query_latent(reader: CheckpointReader, prefix: str) -> dict[str, Any]:
    """Rules for the query latent [x ; 1] by which stock queries have biases; empty where there is none.

    What makes it, and its norm, only hand inputs on: all that a query can learn is in what reads them.
    """
    names = [prefix + name for name in ("q_a_proj.weight", "q_a_proj.bias", "q_a_layernorm.weight")]
    if not all(name in reader for name in names):
        return {}
    weight, constant = reader.tensor(names[0]), float(reader.tensor(names[1])[-1])
    scale, channels = float(weight[0, 0]), weight.shape[1]
    if not torch.equal(weight, torch.eye(channels + 1, channels, dtype=weight.dtype) * scale):
        return {}
    norm = reader.tensor(names[2])
    factor = float(norm[0]) * scale / (float(norm[-1]) * constant)  # of inputs to the constant, after the norm
    return {**dict.fromkeys(names, True), prefix + "q_b_proj.weight": {"columns": [channels], "factor": factor}}
