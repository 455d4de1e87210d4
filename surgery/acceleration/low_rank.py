"""Decode steps of `LowRankAttention` on `lowrank_decode`: keys are rebuilt on the fly, values stay latents."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from transformers import Cache

from surgery.acceleration.masks import row_bounds
from surgery.acceleration.steps import is_step, readable
from surgery.kernels.lowrank_decode.operator import lowrank_decode, rotation_tables
from surgery.kernels.lowrank_decode.rows import lifted, stacked_heads
from surgery.model.attention_functions import norm_width
from surgery.model.low_rank_attention import LowRankAttention
from surgery.model.rotary import rotates_plainly

FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies do not depend on the sequence length, so that tables can be cached."""


def why_not_low_rank(module: LowRankAttention) -> str | None:
    """Return the reason why no kernel supports a layer, or None."""
    if module.window:
        return "a residual window in full precision"
    if module.shares_latents or module.shared_layers:
        return "several layers of a cascade read the latents"
    return why_not_rebuilt(module)


def why_not_rebuilt(module: LowRankAttention) -> str | None:
    """Return the reason why no kernel rebuilds the keys of a layer, or None."""
    (rotary,) = module.rotary
    kind = getattr(rotary, "rope_type", "default")
    if kind not in FIXED_ROPE:
        return f"RoPE type {kind!r} depends on the sequence length"
    if not norms_each_head(module):
        return "the key norm is not an RMSNorm per head"
    if not rotates_plainly(module):
        return "RoPE does not rotate whole heads in half-split pairs"
    if module.sliding_window:
        return "the layer has a sliding window"
    return None


def norms_each_head(module: nn.Module) -> bool:
    """Return whether a layer has no key norm, or an RMS norm per head that applies its weight as stored."""
    norm = module.k_norm
    return norm is None or (norm_width(norm) == module.head_dim and hasattr(norm, "variance_epsilon"))


def low_rank_kernel(
    module: LowRankAttention,
    query: Tensor,
    latent: Tensor,
    mask: Tensor | None,
    cache: Cache | None,
) -> Tensor | None:
    """Compute outputs [B, T, H, d] of rotated query [B, H, T, d]; return None, with nothing cached, if unsupported.

    Args:
        latent: latents of the new tokens [B, 1, T, r].
        mask: as in `row_bounds`.
    """
    queries = query.shape[2]
    if cache is None or not is_step(module, query, queries, "lowrank_decode"):
        return None
    if not readable(query, module.k_norm, module.key_up, module.value_up):
        return None
    latent, _ = cache.update(latent, latent[..., :0], module.layer_idx)
    slots = latent.shape[2]
    lengths, starts = row_bounds(mask, len(query), queries, slots, query.device)
    key_up, value_up, ranges = stacked_ups(module)
    reading = {"ranges": ranges, "lengths": lengths, "starts": starts, **reading_of(module)}
    rotation = rotation_of(module.rotary[0], module.config, slots)
    scale = module.scaling * module.rotary[0].attention_scaling
    out, _ = lowrank_decode(query.transpose(1, 2), latent[:, 0], key_up, scale, rotation=rotation, **reading)
    bias = None if module.value_bias is None else module.value_bias.view(module.num_kv_heads, module.head_dim)
    return lifted(out, value_up, bias)


def reading_of(module: LowRankAttention) -> dict[str, Any]:
    """Return the bias and the norm of a layer's rebuilt keys, as arguments of `lowrank_decode`."""
    bias, norm = module.key_bias, module.k_norm
    return {
        "key_bias": None if bias is None else bias.view(module.num_kv_heads, module.head_dim),
        "norm_weight": None if norm is None else norm.weight,
        "norm_eps": 0.0 if norm is None else norm.variance_epsilon,
    }


def rotation_of(rotary: nn.Module, config: object, slots: int) -> tuple[Tensor, Tensor]:
    """Return the cached rotation tables of a rotary embedding, sized for the model's context or longer sequences."""
    tables = getattr(rotary, "_surgery_tables", None)
    if tables is None or tables[0] < slots or tables[1][0].device != rotary.inv_freq.device:
        size = max(slots, getattr(config, "max_position_embeddings", 0) or 0)
        tables = size, rotation_tables(rotary.inv_freq, size)
        rotary._surgery_tables = tables
    return tables[1]


def stacked_ups(
    module: LowRankAttention,
) -> tuple[Tensor, Tensor, list[tuple[int, int, int, int]] | None]:
    """Return the up-projections of keys and values by head [G, d, r], and each head's ranges in the latent.

    Views for a joint latent (ranges None). Blocks are stacked and zero-padded to the widest rank, cached until the
    weights change.
    """
    weights = [*module.key_up.matrices().values(), *module.value_up.matrices().values()]
    state = tuple((weight.data_ptr(), weight._version) for weight in weights)
    entry = module.__dict__.get("_surgery_ups")
    if entry is None or entry[0] != state:
        entry = module.__dict__["_surgery_ups"] = state, _stack(module)
    return entry[1]


def _stack(module: LowRankAttention) -> tuple[Tensor, Tensor, list[tuple[int, int, int, int]] | None]:
    part, ranks = module._full, module.ranks
    spans = [(end - rank, rank) for end, rank in zip(accumulate(ranks), ranks, strict=True)]
    (key_up, keys), (value_up, values) = (
        stacked_heads(up.matrices(), spans, order, module.head_dim)
        for up, order in ((module.key_up, part.key_order), (module.value_up, part.value_order))
    )
    if len(ranks) == 1:
        return key_up, value_up, None
    return key_up, value_up, [(*key, *value) for key, value in zip(keys, values, strict=True)]
