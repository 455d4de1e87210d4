"""The baseline with fewer KV heads: each the mean of neighbors, as GQA checkpoints are started from MHA ones.

Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
arXiv:2305.13245, who train the model further. Here nothing is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.variants.cache_hook import NoVariant, check_no_variant


def mean_pool(model: PreTrainedModel, kv_heads: int) -> PreTrainedModel:
    """A model of the same class with `kv_heads` KV heads, each the mean of adjacent ones of `model`.

    All other weights and buffers are those of `model`, not copies.

    Raises:
        NoVariant: its layers have no plain `self_attn.k_proj` and `v_proj`, or something in them depends on the number
            of KV heads.
        SurgeryError: `kv_heads` does not divide the model's KV heads; it is a variant already, or spread over several
            devices.
    """
    check_no_variant(model)
    name = type(model).__name__
    heads = getattr(model.config, "num_key_value_heads", None)
    projections = list(_kv_projections(model))
    if not heads or not projections or len(projections) != 2 * model.config.num_hidden_layers:
        raise NoVariant(
            f"KV heads of {name} cannot be pooled: every layer needs linear self_attn.k_proj and v_proj, "
            "and the config num_key_value_heads"
        )
    if kv_heads < 1 or heads % kv_heads:
        raise SurgeryError(f"{heads} KV heads of {name} cannot be pooled to {kv_heads}: a divisor of {heads} is needed")
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise SurgeryError(f"this {name} is spread over several devices: load it on one to pool its KV heads")

    weights = dict(model.state_dict())
    for prefix, projection in projections:
        for kind, parameter in projection.named_parameters():
            weights[f"{prefix}.{kind}"] = _pooled(parameter.detach(), heads, kv_heads)
    config = copy.deepcopy(model.config)
    config.num_key_value_heads = kv_heads
    with torch.device("meta"):
        pooled = type(model)(config)
    try:
        pooled.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise NoVariant(f"KV heads of {name} cannot be pooled, other weights depend on them: {reason}") from None
    pooled.tie_weights()
    for buffer_name, buffer in model.named_buffers():  # those that no state dict has: RoPE's frequencies
        owner, _, leaf = buffer_name.rpartition(".")
        pooled.get_submodule(owner)._buffers[leaf] = buffer
    pooled.generation_config = copy.deepcopy(model.generation_config)
    return pooled.train(model.training)


def _kv_projections(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Name and module of every plain linear key or value projection."""
    for name, module in model.named_modules():
        if name.endswith((".self_attn.k_proj", ".self_attn.v_proj")) and type(module) is nn.Linear:
            yield name, module


def _pooled(weight: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Rows of `heads` heads [heads · d, ...] averaged to `kv_heads` heads, in double precision."""
    grouped = weight.double().unflatten(0, (kv_heads, heads // kv_heads, -1))
    return grouped.mean(dim=1).flatten(0, 1).to(weight.dtype)
