"""Decode steps of `QuantizedLowRankAttention` on a CPU: keys are rebuilt from packed latents, a tile at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import Cache

from surgery.acceleration.low_rank import lifted, rotation_of, stacked_ups, why_not_rebuilt
from surgery.acceleration.masks import row_bounds
from surgery.acceleration.quantized_latent import fields_of, first_positions
from surgery.acceleration.steps import is_step, readable
from surgery.kernels.pack_rows.operator import pack_rows
from surgery.model.quantized_low_rank_attention import QuantizedLowRankAttention
from surgery.model.token_cache import TokenCacheLayer

CPU_ALONE = "lowrank_decode_packed"
"""Operation without a kernel for GPUs."""
COLUMNS = 16
"""Multiple of columns that the kernel reads of the up-projection."""


def why_not_quantized_low_rank(module: QuantizedLowRankAttention) -> str | None:
    """Return the reason why the kernel does not support a layer, or None."""
    return "the layer has several blocks of latents" if len(module.ranks) > 1 else why_not_rebuilt(module)


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
    if not is_step(module, query, new, CPU_ALONE):
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
    (rotary,), norm, (_, value_up, _) = module.rotary, module.k_norm, stacked_ups(module)
    heads = module.num_kv_heads, module.head_dim
    out = getattr(torch.ops.surgery_cpu, CPU_ALONE)(
        query.transpose(1, 2),
        [each.keys[:, 0] for each in layers],
        [each.quantizer.step for each in group],
        [each.quantizer.mean for each in group],
        [each.values[:, 0] for each in layers] if layer.first else [],
        list(chain.from_iterable(map(fields_of, group))),
        [len(fields_of(each)) // 4 for each in group],
        _key_matrix(module),
        module.num_kv_heads,
        module.scaling * rotary.attention_scaling,
        None if module.key_bias is None else module.key_bias.view(heads),
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.variance_epsilon,
        *rotation_of(rotary, module.config, layer.get_seq_length()),
        first_positions(layer.padding, query.device),
        lengths,
        starts,
    )
    bias = None if module.value_bias is None else module.value_bias.view(heads)
    return lifted(out.to(query.dtype), value_up, bias)


def _has_first_tokens(layer: object) -> bool:
    """Return whether a cache layer has all tokens that stay in full precision, or keeps none."""
    if not isinstance(layer, TokenCacheLayer):
        return True
    return layer.padding is not None and layer.get_seq_length() >= layer.padding.most + layer.first


def _key_matrix(module: QuantizedLowRankAttention) -> Tensor:
    """Return the transposed up-projection of keys, fp32 [R, G·d padded to `COLUMNS`], cached until it changes."""
    weight = module.key_up.matrices()[0]
    state = weight.data_ptr(), weight._version
    entry = module.__dict__.get("_surgery_key_matrix")
    if entry is None or entry[0] != state:
        up = weight.detach().float().mT
        entry = state, nn.functional.pad(up, (0, -up.shape[1] % COLUMNS)).contiguous()
        module.__dict__["_surgery_key_matrix"] = entry
    return entry[1]
