"""Fewer KV heads: choice of the target architecture, and names and shapes of its tensors, which are the source's.

With the same number of KV heads in all layers the target is the source's class with another ``num_key_value_heads``.
Numbers that differ between layers need the custom model class or DeciLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from surgery.architectures import custom_class, decilm
from surgery.architectures.custom_class import own_config
from surgery.checkpoint import CheckpointReader, TensorSpec
from surgery.checkpoint.config_file import with_legacy_rope_keys
from surgery.checkpoint.kv_widths import DECILM
from surgery.families import FAMILIES
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.base import ATTENTION_PREFIX
from surgery.model.grouped_entry import GroupedEntry
from surgery.model.layer_entry import StockEntry

OWN_FAMILY = "a plain checkpoint of the source's own family"
DIFFERENT_LAYERS = "no class of the family holds layers with different numbers of KV heads"
NO_KV_HEADS = "the family's own class has a KV head for every query head"
ASKED_FOR = "set by --carrier"
OUTPUT = ("o_proj", "weight")


@dataclass(frozen=True)
class Carrier:
    """Target architecture of a conversion to fewer KV heads.

    ``final_config`` is config.json of another class for the same tensors, which replaces ``config`` after verification;
    ``final_code`` are the files that it needs.
    """

    model_type: str
    reason: str
    config: dict[str, Any]
    custom_class: bool = False
    final_config: dict[str, Any] | None = None
    final_code: tuple[Path, ...] = ()


def choose_carrier(source: dict[str, Any], heads: Sequence[int], carrier: str) -> Carrier:
    """Choose the target architecture ("auto", "own" or "decilm") for these numbers of KV heads by layer.

    Raises SurgeryError: DeciLM cannot hold the model.
    """
    uniform = len(set(heads)) == 1
    holds = FAMILIES[source["model_type"]].renamed is None  # fewer KV heads than query heads
    if carrier == "auto" and uniform and holds:
        config = with_legacy_rope_keys({**source, "num_key_value_heads": heads[0]})
        return Carrier(source["model_type"], OWN_FAMILY, config)
    reason = (ASKED_FOR if holds else NO_KV_HEADS) if uniform else DIFFERENT_LAYERS
    own = config_of_custom_class(source, heads)
    if carrier == "decilm":
        final = decilm.config_with_heads(source, heads)
        return Carrier(DECILM, reason, own, final_config=final, final_code=(decilm.CONFIG_CODE,))
    return Carrier(custom_class.MODEL_TYPE, reason, own, custom_class=True)


def has_head_dim(config: object) -> bool:
    """Return whether the class of a transformers config has a ``head_dim`` field."""
    return "head_dim" in {field.name for field in fields(type(config))}


def config_with_query_heads(config: dict[str, Any], heads: int, head_dim: int) -> dict[str, Any]:
    """Return a family's config.json with another number of query heads of the same ``head_dim``."""
    return {**config, "num_attention_heads": heads, "head_dim": head_dim}


def config_of_custom_class(source: dict[str, Any], heads: Sequence[int]) -> dict[str, Any]:
    """Return config.json of the custom model class; layers with as many KV heads as the source keep its attention."""
    stock = source.get("num_key_value_heads") or source["num_attention_heads"]
    entries = [StockEntry() if count == stock else GroupedEntry(kv_heads=count) for count in heads]
    return own_config(source, entries)


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
