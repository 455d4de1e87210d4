"""Fewer KV heads: choice of the target architecture, and names and shapes of its tensors, which are the source's.

The target is the source's class with another ``num_key_value_heads``, or the custom model class for families without.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from surgery.architectures import custom_class
from surgery.architectures.custom_class import own_config
from surgery.checkpoint import CheckpointReader, TensorSpec
from surgery.checkpoint.config_file import with_legacy_rope_keys
from surgery.families import FAMILIES
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.base import ATTENTION_PREFIX
from surgery.model.grouped_entry import GroupedEntry

OWN_FAMILY = "a plain checkpoint of the source's own family"
NO_KV_HEADS = "the family's own class has a KV head for every query head"
OUTPUT = ("o_proj", "weight")


@dataclass(frozen=True)
class Carrier:
    """Target architecture of a conversion to fewer KV heads."""

    model_type: str
    reason: str
    config: dict[str, Any]
    custom_class: bool = False


def choose_carrier(source: dict[str, Any], layers: int, kv_heads: int) -> Carrier:
    """Choose the target architecture for this number of KV heads in every layer."""
    if FAMILIES[source["model_type"]].renamed is None:  # its class has a number of KV heads
        config = with_legacy_rope_keys({**source, "num_key_value_heads": kv_heads})
        return Carrier(source["model_type"], OWN_FAMILY, config)
    entries = [GroupedEntry(kv_heads=kv_heads)] * layers
    return Carrier(custom_class.MODEL_TYPE, NO_KV_HEADS, own_config(source, entries), custom_class=True)


def has_head_dim(config: object) -> bool:
    """Return whether the class of a transformers config has a ``head_dim`` field."""
    return "head_dim" in {field.name for field in fields(type(config))}


def config_with_query_heads(config: dict[str, Any], heads: int, head_dim: int) -> dict[str, Any]:
    """Return a family's config.json with another number of query heads of the same ``head_dim``."""
    return {**config, "num_attention_heads": heads, "head_dim": head_dim}


def planned_attention(
    reader: CheckpointReader, names: list[str], layer: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, TensorSpec]:
    """Return the dtypes and shapes of a layer's attention tensors with these numbers of heads, by name."""
    prefix = ATTENTION_PREFIX.format(layer=layer)
    rows = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim, "sinks": heads}
    plan = {}
    for name in names:
        info, (module, _, kind) = reader.info(name), name.removeprefix(prefix).partition(".")
        shape = (rows.get(module, info.shape[0]), *info.shape[1:])
        plan[name] = TensorSpec(info.dtype, (shape[0], heads * head_dim) if (module, kind) == OUTPUT else shape)
    return plan


def attention_tensors(anatomy: AttentionAnatomy, layer: int) -> dict[str, Tensor]:
    """Return a layer's projections, biases and learned sinks by tensor name."""
    queries, query_bias = anatomy.stored_queries()
    parts = {
        "q_proj.weight": queries,
        "k_proj.weight": anatomy.stored(anatomy.k).flatten(0, 1),
        "v_proj.weight": anatomy.v.flatten(0, 1),
        "o_proj.weight": anatomy.o.flatten(1),
        "q_proj.bias": query_bias,
        "k_proj.bias": None if anatomy.k_bias is None else anatomy.stored(anatomy.k_bias),
        "v_proj.bias": anatomy.v_bias,
        "o_proj.bias": anatomy.o_bias,
        "sinks": anatomy.sinks,
    }
    prefix = ATTENTION_PREFIX.format(layer=layer)
    return {
        prefix + name: value.flatten() if value.ndim != 2 or "bias" in name else value
        for name, value in parts.items()
        if value is not None
    }
