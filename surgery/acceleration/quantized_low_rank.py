"""Decode steps of `QuantizedLowRankAttention`: keys are rebuilt from packed latents.

On a CPU one kernel unpacks and rebuilds a tile at a time. On a GPU the rows of the layers that a layer reads are
unpacked into memory of one layer, which `lowrank_decode` reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

from surgery.acceleration.low_rank import reading_of, rotation_of, stacked_ups
from surgery.acceleration.masks import row_bounds
from surgery.acceleration.quantized_latent import fields_of, first_positions
from surgery.acceleration.steps import is_step, readable
from surgery.kernels import cpu
from surgery.kernels.lowrank_decode.operator import lowrank_decode
from surgery.kernels.lowrank_decode.rows import IN_CPP, decode_rows, lifted, transposed_keys
from surgery.kernels.pack_rows.operator import pack_rows
from surgery.kernels.unpack_rows.operator import unpack_rows
from surgery.model.quantized_low_rank_attention import QuantizedLowRankAttention
from surgery.model.token_cache import TokenCacheLayer


def quantized_low_rank_kernel(
    module: QuantizedLowRankAttention,
    query: Tensor,
    latent: Tensor,
    mask: Tensor | None,
    cache: Cache | None,
    *,
    group: Sequence[QuantizedLowRankAttention],
) -> Tensor | None:
    """Compute outputs [B, T, H, d] of rotated query [B, H, T, d]; return None, with nothing cached, if unsupported.

    Args:
        latent: latents of the new tokens [B, 1, T, r], predictions from earlier layers not yet subtracted.
        mask: as in `row_bounds`.
        group: attention of the earlier layers that this one reads, and `module`.
    """
    new = query.shape[2]
    if cache is None or torch.compiler.is_compiling() or not readable(query, module.key_up):
        return None
    if not is_step(module, query, new, IN_CPP):
        return None
    layers = [cache.layers[each.layer_idx] for each in group]
    if not all(map(_has_first_tokens, cache.layers)):  # the same for all layers of a group
        return None
    layer, shared = layers[-1], module.shared_latents
    if module.shared_layers:
        earlier = torch.cat([shared[each.layer_idx][:, 0, -new:] for each in group[:-1]], dim=-1)
        latent = latent - module.shared_down(earlier).unsqueeze(1)
    quantizer = module.quantizer
    rows = pack_rows(latent[:, 0], quantizer.step, quantizer.mean, fields_of(module))[:, None]
    if module.shares_latents:
        shared[module.layer_idx] = quantizer.decode(rows, latent.dtype)
    layer.update(rows, latent)
    lengths, starts = row_bounds(mask, len(query), new, layer.get_seq_length(), query.device)
    (rotary,), (key_up, value_up, ranges) = module.rotary, stacked_ups(module)
    query, scale = query.transpose(1, 2), module.scaling * rotary.attention_scaling
    rotation = rotation_of(rotary, module.config, layer.get_seq_length())
    reading = {"lengths": lengths, "starts": starts, **reading_of(module)}
    if cpu.runs(IN_CPP, query):
        rank = key_up.shape[-1]
        out = decode_rows(
            query,
            [each.keys[:, 0] for each in layers],
            [each.quantizer.step for each in group],
            [each.quantizer.mean for each in group],
            [each.values[:, 0] for each in layers] if layer.first else [],
            [fields_of(each) for each in group],
            _keys(module),
            [(0, rank, 0, rank)] * module.num_kv_heads if ranges is None else ranges,
            scale,
            within=rotation[0],
            begins=rotation[1],
            exact_starts=first_positions(layer.padding, query.device),
            **reading,
        )
    else:
        latents = _unpacked(query, layers, group, lengths, starts)
        out, _ = lowrank_decode(query, latents, key_up, scale, rotation=rotation, ranges=ranges, **reading)
    bias = None if module.value_bias is None else module.value_bias.view(module.num_kv_heads, module.head_dim)
    return lifted(out.to(query.dtype), value_up, bias)


def _unpacked(
    query: Tensor,
    layers: Sequence[TokenCacheLayer],
    group: Sequence[QuantizedLowRankAttention],
    lengths: Tensor | None,
    starts: Tensor | None,
) -> Tensor:
    """Unpack the visible rows of the layers of a group into latents [B, S, R] in the dtype of the query."""
    ranks = [each.quantizer.format.channels for each in group]
    latents = query.new_empty(len(query), layers[-1].keys.shape[2], sum(ranks))
    for layer, member, memory in zip(layers, group, latents.split(ranks, dim=-1), strict=True):
        unpack_rows(
            layer.keys[:, 0].view(torch.int16),
            member.quantizer.step,
            member.quantizer.mean,
            memory,
            memory[..., :0],
            fields=fields_of(member),
            lengths=lengths,
            starts=starts,
            exact=layer.values[:, 0].to(query.dtype) if layer.first else None,
            exact_starts=first_positions(layer.padding, query.device),
        )
    return latents


def _has_first_tokens(layer: object) -> bool:
    """Return whether a cache layer has all tokens that stay in full precision, or keeps none."""
    if not isinstance(layer, TokenCacheLayer):
        return True
    return layer.padding is not None and layer.get_seq_length() >= layer.padding.most + layer.first


def _keys(module: QuantizedLowRankAttention) -> Tensor:
    """Return the up-projections of keys as the C++ kernel reads them, cached until they change."""
    key_up, entry = stacked_ups(module)[0], module.__dict__.get("_surgery_keys")
    if entry is None or entry[0] is not key_up:
        entry = module.__dict__["_surgery_keys"] = key_up, transposed_keys(key_up)
    return entry[1]
