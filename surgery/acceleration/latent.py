"""Decode steps of `LatentAttention` on `mla_decode`, which reads the cached latents once for all heads."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import Cache

from surgery.acceleration.masks import row_bounds
from surgery.acceleration.steps import is_step
from surgery.kernels.mla_decode.operator import mla_decode


def why_not_latent(module: nn.Module) -> str | None:
    """Return the reason why no kernel supports a layer, or None."""
    return "the key norm spans all heads" if module.key_gains not in (0, module.num_kv_heads) else None


def latent_kernel(
    module: nn.Module, query: Tensor, latent: Tensor, positional: Tensor, mask: Tensor | None, cache: Cache | None
) -> Tensor | None:
    """Compute attention-weighted latents [B, T, H, r] of the heads; return None, with nothing cached, if unsupported.

    Args:
        query: [B, H, T, r + ρ].
        latent, positional: latents [B, 1, T, r] and rotary keys (with gains) [B, 1, T, ρ (+ G)] of the new tokens.
        mask: as in `row_bounds`.
    """
    queries = query.shape[2]
    if cache is None or (queries > 1 and module.sliding_window) or not is_step(module, query, queries, "mla_decode"):
        return None
    query = query.transpose(1, 2)
    latent, positional = cache.update(latent, positional, module.layer_idx)
    lengths, starts = row_bounds(mask, len(query), queries, latent.shape[2], query.device)
    rope_key, gain = positional[:, 0], None
    if module.key_norm_eps is not None:
        rope_key, gain = rope_key.split((module.rope_dim, module.num_kv_heads), dim=-1)
    out, _ = mla_decode(query, latent[:, 0], rope_key, module.scaling, lengths=lengths, starts=starts, key_gain=gain)
    return out
