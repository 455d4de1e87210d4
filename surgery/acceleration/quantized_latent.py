"""Decode steps of `QuantizedLatentAttention`: `pack_rows` for new tokens, `mla_decode_packed` over the packed cache."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from surgery.acceleration.latent import why_not_latent
from surgery.acceleration.low_rank import rotation_of
from surgery.acceleration.masks import row_bounds
from surgery.acceleration.steps import is_step
from surgery.kernels.mla_decode.packed_operator import mla_decode_packed, over_values
from surgery.kernels.pack_rows.operator import pack_rows
from surgery.model.left_padding import LeftPadding
from surgery.model.quantized_latent_attention import QuantizedLatentAttention
from surgery.model.step_memo import once
from surgery.model.token_cache import TokenCacheLayer
from surgery.model.token_quantizer import with_gains


def why_not_quantized_latent(module: QuantizedLatentAttention) -> str | None:
    """Return the reason why no kernel supports a layer, or None; synchronizes to read the quantizer's steps."""
    pairs = module.quantizer.step[module.kv_lora_rank :].view(-1, 2)
    if not torch.equal(pairs[:, 0], pairs[:, 1]):
        return "the two elements of a rotary pair have different quantization steps"
    return why_not_latent(module)


def quantized_latent_kernel(
    module: QuantizedLatentAttention,
    query: Tensor,
    values: Tensor,
    hidden_states: Tensor,
    mask: Tensor | None,
    layer: TokenCacheLayer,
) -> Tensor | None:
    """Compute attention-weighted sums [B, T, H, value_width] of the heads; None, with nothing cached, if unsupported.

    Args:
        query: rotated, [B, H, T, r + ρ].
        values: latents and unrotated rotary keys of the new tokens [B, 1, T, r + ρ].
        hidden_states: hidden states of the new tokens [B, T, D].
        mask: as in `row_bounds`.
        layer: this layer of the cache.
    """
    queries = query.shape[2]
    if not is_step(module, query, queries, "mla_decode_packed"):
        return None
    step, mean, fields = module.quantizer.step, module.quantizer.mean, fields_of(module)
    new = pack_rows(module.quantizer.corrected(values[:, 0]), step, mean, fields)[:, None]
    if module.key_norm_eps is not None:
        new = with_gains(new, module._key_irms(hidden_states))
    rows, first = layer.update(new, values)
    lengths, starts = row_bounds(mask, len(query), queries, rows.shape[2], query.device)
    query = over_values(query, module.rope_dim, module.entry.value_width - module.kv_lora_rank)
    out, _ = mla_decode_packed(
        query.transpose(1, 2),
        rows[:, 0].view(torch.int16),
        step,
        mean,
        module.scaling,
        fields=fields,
        rank=module.kv_lora_rank,
        rotation=rotation_of(module.rotary, module.config, rows.shape[2]) if module.rope_dim else None,
        exact=first[:, 0].to(query.dtype),
        exact_starts=first_positions(layer.padding, query.device),
        lengths=lengths,
        starts=starts,
    )
    return out


def fields_of(module: nn.Module) -> tuple[int, ...]:
    """Return the cached `fields` argument of `mla_decode_packed` for a layer in bits."""
    fields = module.__dict__.get("_surgery_fields")
    if fields is None:
        fields = module.__dict__["_surgery_fields"] = tuple(chain.from_iterable(module.quantizer.format.fields()))
    return fields


def first_positions(padding: LeftPadding, device: torch.device) -> Tensor | None:
    """Return the position of each row's first token that is no padding, int32 [B]; None without padding."""
    if not padding.most:
        return None
    positions = padding.on(device)
    return once(positions, first_positions, lambda: positions.to(torch.int32))
