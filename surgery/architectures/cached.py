"""The custom model class around unchanged attention, with a quantized cache; and what a rotation can be folded into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.families.base import ATTENTION_PREFIX, head_shape
from surgery.families.latent_family import DOWN, NORM, UP
from surgery.model.attention_functions import OUTPUT_GATES
from surgery.model.latent_entry import LatentEntry
from surgery.model.layer_entry import caches_latents
from surgery.model.low_rank_entry import LowRankEntry
from surgery.model.parts import entries_of
from surgery.transforms.hadamard import hadamard, rotate_latent, rotate_values

REASON = "no stock class keeps a quantized cache by itself"


def check_quantizable(path: Path, config) -> None:
    """Raises SurgeryError if a model's cache is quantized already, forgets tokens, or is shared by layers."""
    from surgery.model.cache_layer import check_full_attention

    try:
        check_full_attention(config, "a quantized KV cache")
    except ValueError as error:
        raise SurgeryError.at(path, f"{error}") from None
    if getattr(config, "base_model_type", config.model_type) in OUTPUT_GATES:
        raise SurgeryError.at(
            path, "values before a gate cannot be rotated, which a quantized cache needs. Leave --bits out"
        )
    if getattr(config, "kv_cache", None):
        raise SurgeryError.at(path, "its KV cache is quantized already; convert the checkpoint that it was made of")
    for index, entry in enumerate(entries_of(config)):
        if entry.shares_cache or entry.quantizes:
            raise SurgeryError.at(path, f"layer {index} has {entry.kind} attention, whose cache cannot be quantized")


def rotated_tensors(reader: CheckpointReader, config, layer: int) -> dict[str, Tensor]:
    """A layer's tensors with a Hadamard rotation folded in, in their own dtype: values, or the latent."""
    prefix, (modules, rotate) = ATTENTION_PREFIX.format(layer=layer), _rotation(config, layer)
    names = [name for name in reader.names() if name.startswith(tuple(prefix + part for part in modules))]
    tensors = {name.removeprefix(prefix): reader.tensor(name) for name in names}
    return {prefix + name: tensor.to(tensors[name].dtype).contiguous() for name, tensor in rotate(tensors).items()}


def _rotation(config, layer: int) -> tuple[tuple[str, ...], Callable[[dict[str, Tensor]], dict[str, Tensor]]]:
    """Return the prefixes of the tensors that a layer's rotation changes, and the function that rotates them."""
    entries = entries_of(config)
    entry = entries[layer]
    if isinstance(entry, LatentEntry):
        return ("kv_down.", "query_up", "value_up"), partial(_rotated_latent, rank=entry.kv_lora_rank)
    if isinstance(entry, LowRankEntry):
        earlier = [rank for other in entries[layer - entry.shared_layers : layer] for rank in other.ranks]
        return ("kv_down.weight", "key_up.", "value_up."), partial(_rotated_blocks, ranks=entry.ranks, earlier=earlier)
    if entry.kind is None and caches_latents(config):
        return (f"{DOWN}.", f"{NORM}.weight", f"{UP}.weight"), partial(_rotated_behind_norm, rank=config.kv_lora_rank)
    heads, kv_heads, _ = head_shape(config)
    return ("v_proj.", "o_proj.weight"), partial(
        _rotated_values, heads=heads, kv_heads=getattr(entry, "kv_heads", kv_heads)
    )


def _rotated_values(tensors: dict[str, Tensor], heads: int, kv_heads: int) -> dict[str, Tensor]:
    v, o, bias = tensors["v_proj.weight"], tensors["o_proj.weight"], tensors.get("v_proj.bias")
    v, o, bias = rotate_values(
        v.unflatten(0, (kv_heads, -1)),
        o.unflatten(1, (heads, -1)),
        None if bias is None else bias.unflatten(0, (kv_heads, -1)),
    )
    rotated = {"v_proj.weight": v.flatten(0, 1), "o_proj.weight": o.flatten(1)}
    return rotated if bias is None else {**rotated, "v_proj.bias": bias.flatten()}


def _rotated_behind_norm(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Latents of a family's MLA: a rotation leaves their norm unchanged once its weight is one for all.

    It stays if it is, as in what conversions write; else it goes to what reads them.
    """
    rows = {name: tensor.double() for name, tensor in tensors.items()}
    weight, up, bias = rows[f"{NORM}.weight"], rows[f"{UP}.weight"], rows.get(f"{DOWN}.bias")
    norm = weight if bool((weight == weight[0]).all()) else torch.ones_like(weight)
    up = up * (weight / norm)
    turned = rotate_latent(rows[f"{DOWN}.weight"][:rank], [up], None if bias is None else bias[:rank])
    rows[f"{DOWN}.weight"][:rank], (rows[f"{UP}.weight"],), latent_bias = turned
    if bias is not None:
        bias[:rank] = latent_bias
    return {**rows, f"{NORM}.weight": norm}


def _rotated_latent(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    down, bias = tensors["kv_down.weight"].double(), tensors.get("kv_down.bias")
    query, value = tensors["query_up"].double(), tensors["value_up"]
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


def _rotated_blocks(tensors: dict[str, Tensor], ranks: Sequence[int], earlier: Sequence[int]) -> dict[str, Tensor]:
    """Low-rank latents, a rotation for each block; those of earlier layers come in with theirs."""
    rotated = {"kv_down.weight": _rotations(ranks).T @ tensors["kv_down.weight"].double()}
    for number, rank in enumerate(ranks):
        columns = _rotations([*earlier, rank])
        for name in (f"key_up.{number}", f"value_up.{number}"):
            if name in tensors:
                rotated[name] = tensors[name].double() @ columns
    return rotated


def _rotations(ranks: Sequence[int]) -> Tensor:
    """The rotations of blocks of latents along the diagonal, float64."""
    return torch.block_diag(*map(hadamard, ranks))
