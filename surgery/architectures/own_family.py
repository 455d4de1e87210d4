"""Fewer KV heads in the source's own family: the same names and class, another ``num_key_value_heads``."""

from __future__ import annotations

from torch import Tensor

from surgery.anatomy import AttentionAnatomy
from surgery.checkpoint import CheckpointReader, TensorSpec
from surgery.families.base import ATTENTION_PREFIX

OWN_FAMILY = "a plain checkpoint of the source's own family"
ENGINES = {engine: "yes, as the source" for engine in ("transformers", "vLLM", "SGLang", "llama.cpp")}


def planned_attention(
    reader: CheckpointReader, names: list[str], layer: int, kv_heads: int, head_dim: int
) -> dict[str, TensorSpec]:
    """Dtype and shape of a layer's attention tensors with that many KV heads, by the source's names."""
    resized = tuple(f"{ATTENTION_PREFIX.format(layer=layer)}{p}_proj." for p in "kv")
    plan = {}
    for name in names:
        info = reader.info(name)
        shape = (kv_heads * head_dim, *info.shape[1:]) if name.startswith(resized) else info.shape
        plan[name] = TensorSpec(info.dtype, shape)
    return plan


def attention_tensors(anatomy: AttentionAnatomy, layer: int) -> dict[str, Tensor]:
    """A layer's projections and biases under their names."""
    parts = {
        "q_proj.weight": anatomy.q.flatten(0, 1),
        "k_proj.weight": anatomy.k.flatten(0, 1),
        "v_proj.weight": anatomy.v.flatten(0, 1),
        "o_proj.weight": anatomy.o.flatten(1),
        "q_proj.bias": anatomy.q_bias,
        "k_proj.bias": anatomy.k_bias,
        "v_proj.bias": anatomy.v_bias,
        "o_proj.bias": anatomy.o_bias,
    }
    prefix = ATTENTION_PREFIX.format(layer=layer)
    return {
        prefix + name: value.flatten() if value.ndim != 2 or "bias" in name else value
        for name, value in parts.items()
        if value is not None
    }


def config_with_heads(config: dict, kv_heads: int) -> dict:
    """The source's config.json with that many KV heads."""
    return {**config, "num_key_value_heads": kv_heads}
