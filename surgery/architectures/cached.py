"""The project's own class around attention as it is, with a quantised cache; and what a rotation can be folded into."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.families.base import ATTENTION_PREFIX, head_shape
from surgery.families.latent_family import DOWN, NORM, UP
from surgery.model.attention_functions import OUTPUT_GATES
from surgery.model.configuration_surgery import caches_latents
from surgery.transforms.hadamard import hadamard, rotate_latent, rotate_values

REASON = "no stock class keeps a quantised cache by itself"

KINDS = (None, "grouped", "hybrid", "latent", "low_rank")
"""Attention whose cache layers can be quantised ones; None is the family's own."""


def check_quantizable(path: Path, config) -> None:
    """Raises SurgeryError if a model's cache is quantised already, forgets tokens, or is shared by layers."""
    from surgery.model.cache_layer import check_full_attention

    try:
        check_full_attention(config, "a quantised KV cache")
    except ValueError as error:
        raise SurgeryError(f"{path}: {error}") from None
    if getattr(config, "base_model_type", config.model_type) in OUTPUT_GATES:
        raise SurgeryError(
            f"{path}: values behind a gate cannot be rotated, which a quantised cache asks for: leave --bits out"
        )
    if getattr(config, "kv_cache", None):
        raise SurgeryError(f"{path}: its KV cache is quantised already; convert the checkpoint that it was made of")
    for index, entry in enumerate(getattr(config, "attention_layers", None) or ()):
        kind = entry and entry["kind"]
        if kind not in KINDS:
            raise SurgeryError(f"{path}: layer {index} has {kind} attention, whose cache cannot be quantised")


def rotated_tensors(reader: CheckpointReader, config, layer: int) -> dict[str, Tensor]:
    """A layer's tensors with a Hadamard rotation folded in, in their own dtype: values, or the latent."""
    names = _sources(reader, config, layer)
    prefix = ATTENTION_PREFIX.format(layer=layer)
    found = {name.removeprefix(prefix): reader.tensor(name) for name in names}
    entry = _entry(config, layer)
    if entry is None and caches_latents(config):
        rotated = _rotated_behind_norm(found, config.kv_lora_rank)
    elif entry is None or "kv_heads" in entry:
        rotated = _rotated_values(found, config, entry)
    elif entry["kind"] == "latent":
        rotated = _rotated_latent(found, entry)
    else:
        rotated = _rotated_blocks(found, config.attention_layers, layer)
    return {prefix + name: tensor.to(found[name].dtype).contiguous() for name, tensor in rotated.items()}


def _entry(config, layer: int) -> dict | None:
    layers = getattr(config, "attention_layers", None)
    return layers[layer] if layers else None


def _sources(reader: CheckpointReader, config, layer: int) -> list[str]:
    entry = _entry(config, layer)
    if entry is None and caches_latents(config):
        wanted = (f"{DOWN}.", f"{NORM}.weight", f"{UP}.weight")
    elif entry is None or "kv_heads" in entry:
        wanted = ("v_proj.", "o_proj.weight")
    elif entry["kind"] == "latent":
        wanted = ("kv_down.", "query_up", "value_up")
    else:
        wanted = ("kv_down.weight", "key_up.", "value_up.")
    prefix = ATTENTION_PREFIX.format(layer=layer)
    return [name for name in reader.names() if name.startswith(tuple(prefix + part for part in wanted))]


def _rotated_values(found: dict[str, Tensor], config, entry: dict | None) -> dict[str, Tensor]:
    heads, kv_heads, head_dim = head_shape(config)
    kv_heads = kv_heads if entry is None else entry["kv_heads"]
    v, o, bias = found["v_proj.weight"], found["o_proj.weight"], found.get("v_proj.bias")
    v, o, bias = rotate_values(
        v.view(kv_heads, head_dim, -1),
        o.view(-1, heads, head_dim),
        None if bias is None else bias.view(kv_heads, head_dim),
    )
    rotated = {"v_proj.weight": v.flatten(0, 1), "o_proj.weight": o.flatten(1)}
    return rotated if bias is None else {**rotated, "v_proj.bias": bias.flatten()}


def _rotated_behind_norm(found: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Latents of a family's MLA: a rotation leaves their norm as it is once its weight is one for all.

    It stays if it is, as in what conversions write; else it goes to what reads them.
    """
    rows = {name: tensor.double() for name, tensor in found.items()}
    weight, up, bias = rows[f"{NORM}.weight"], rows[f"{UP}.weight"], rows.get(f"{DOWN}.bias")
    kept = weight if bool((weight == weight[0]).all()) else torch.ones_like(weight)
    up = up * (weight / kept)
    turned = rotate_latent(rows[f"{DOWN}.weight"][:rank], [up], None if bias is None else bias[:rank])
    rows[f"{DOWN}.weight"][:rank], (rows[f"{UP}.weight"],), latent_bias = turned
    if bias is not None:
        bias[:rank] = latent_bias
    return {**rows, f"{NORM}.weight": kept}


def _rotated_latent(found: dict[str, Tensor], entry: dict) -> dict[str, Tensor]:
    rank = entry["kv_lora_rank"]
    down, bias = found["kv_down.weight"].double(), found.get("kv_down.bias")
    query, value = found["query_up"].double(), found["value_up"]
    latent_bias = None if bias is None else bias[:rank]
    down[:rank], (query[..., :rank], value), latent_bias = rotate_latent(
        down[:rank], [query[..., :rank], value], latent_bias
    )
    rotated = {"kv_down.weight": down, "query_up": query, "value_up": value}
    if bias is not None:
        bias = bias.double()
        bias[:rank] = latent_bias
        rotated["kv_down.bias"] = bias
    return rotated


def _rotated_blocks(found: dict[str, Tensor], layers: list[dict], layer: int) -> dict[str, Tensor]:
    """Low-rank latents, a rotation for each block; those of earlier layers come in with theirs."""
    blocks = layers[layer]["blocks"]
    earlier = [block for entry in layers[layer - layers[layer]["shared_layers"] : layer] for block in entry["blocks"]]
    rotated = {"kv_down.weight": _rotations(blocks).T @ found["kv_down.weight"].double()}
    for number, block in enumerate(blocks):
        columns = _rotations([*earlier, block])
        for name in (f"key_up.{number}", f"value_up.{number}"):
            if name in found:
                rotated[name] = found[name].double() @ columns
    return rotated


def _rotations(blocks: list[dict]) -> Tensor:
    """The rotations of blocks of latents along the diagonal, float64."""
    return torch.block_diag(*(hadamard(block["rank"]) for block in blocks))
