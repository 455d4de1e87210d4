"""Decode steps of `CrossLayerAttention` on `lowrank_decode`, which reads the latents shared by layers as stored."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache

from surgery.acceleration.low_rank import FIXED_ROPE, lifted, norms_each_head, rotation_of
from surgery.acceleration.masks import row_bounds
from surgery.acceleration.steps import is_step, readable
from surgery.kernels.lowrank_decode.operator import lowrank_decode
from surgery.model.cross_layer_attention import CrossLayerAttention
from surgery.model.group_cache import GroupLayer, Reading
from surgery.model.rotary import rotates_plainly
from surgery.model.step_memo import once


def why_not_cross_layer(module: CrossLayerAttention) -> str | None:
    """Return the reason why no kernel supports a layer, or None."""
    kind = getattr(module.rotary[0], "rope_type", "default") if module.rotary else "no"
    if kind not in FIXED_ROPE:
        return f"RoPE type {kind!r} has no fixed frequencies"
    if not norms_each_head(module):
        return "the key norm is not an RMSNorm per head"
    return None if rotates_plainly(module) else "RoPE does not rotate whole heads in half-split pairs"


def cross_layer_kernel(
    module: CrossLayerAttention,
    query: Tensor,
    tokens: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    mask: Tensor | None,
    cache: Cache | None,
    real: Tensor | None,
    reading: Reading,
) -> Tensor | None:
    """Compute outputs [B, T, H, d] of rotated query [B, H, T, d]; return None, with nothing cached, if unsupported.

    Args:
        tokens: keys and values of the new tokens as the group stores them [B, 1, T, 2·G·d], without biases.
        biases: key bias and value bias [G·d].
        mask: mask over positions, as in `row_bounds`.
        real: bool [B, T], false at padding; None without padding.
        reading: rebuilt and exact positions that the new tokens read.
    """
    rows, _, queries, _ = query.shape
    layer = None if cache is None else cache.layers[module.layer_idx]
    if not isinstance(layer, GroupLayer) or not readable(query, module.k_norm):
        return None
    if not is_step(module, query, queries, "lowrank_decode"):
        return None
    if real is not None:
        tokens = tokens * real[:, None, :, None].to(tokens.dtype)
    low, stop = reading.rebuilt
    exact, _ = cache.update(tokens, tokens[..., :0], module.layer_idx)
    heads = module.num_kv_heads, module.head_dim
    key, value = (part.unflatten(-1, heads).transpose(1, 2) for part in exact[:, 0].split(module.width // 2, dim=-1))
    up_key, up_value = (up.unflatten(0, heads) for up in module.basis_up.detach().split(module.width // 2))
    if low < stop:
        latents = layer.store.read(module.index_in_group, low, stop)
    else:  # nothing to rebuild yet: one latent that no query reads
        latents = tokens.new_zeros(rows, 1, 1, module.entry.rank)
    _, starts = row_bounds(mask, rows, queries, layer.seen, query.device)
    lengths, first, rebuilt, exact_slots = once(reading.exact, rows, lambda: _row_arguments(reading, layer.seen, rows))
    norm, (key_bias, value_bias) = module.k_norm, (None if bias is None else bias.view(heads) for bias in biases)
    out, exact_out, _ = lowrank_decode(
        query.transpose(1, 2),
        latents[:, 0],
        up_key,
        module.scaling * module.rotary[0].attention_scaling,
        rotation=rotation_of(module.rotary[0], module.config, layer.seen),
        key_bias=key_bias,
        norm_weight=None if norm is None else norm.weight,
        norm_eps=0.0 if norm is None else norm.variance_epsilon,
        lengths=lengths,
        starts=starts,
        first=first,
        rebuilt=rebuilt,
        window=reading.window,
        exact_key=key,
        exact_value=value,
        exact_slots=exact_slots,
        raw_exact=True,
    )
    layer.settle(module.encode)
    return lifted(out, up_value, exact_out, value_bias)


def _row_arguments(reading: Reading, past_length: int, rows: int) -> tuple[Tensor, ...]:
    """Return int32 lengths [B], first latents [B], rebuilt ranges [B, 2] and positions [B, E] in full precision."""
    low, stop = reading.rebuilt
    device, dtype = reading.exact.device, torch.int32
    lengths, first, last = (
        torch.full((rows,), number, dtype=dtype, device=device) for number in (past_length, low, max(low, stop))
    )
    return lengths, first, torch.stack([first, last], dim=1), reading.exact.to(dtype).repeat(rows, 1)
