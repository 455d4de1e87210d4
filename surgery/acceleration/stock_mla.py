"""Attention function "surgery" for transformers' AttentionInterface: SDPA, but for decode steps of stock MLA.

Stock `deepseek_v3` caches latents and expands all of them to keys and values at every step. Under `accelerate` its
modules pass on the cached latents. A decode step here absorbs the up-projections into query and output (DeepSeek-V2,
arXiv:2405.04434, appendix C) and reads the latents with `mla_decode`. All other calls (prompts, training, attention
weights, the CPU) expand them as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from surgery.acceleration.masks import row_bounds
from surgery.acceleration.steps import is_step, readable
from surgery.kernels.mla_decode.operator import mla_decode

NAME = "surgery"
PASSES_LATENTS = "_surgery_passes_latents"
"""Attribute of stock MLA modules that pass latents and rotated keys instead of keys and values."""


def register() -> None:
    """Register the attention function with transformers; safe to call more than once."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, surgery_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def surgery_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention [B, T, H, v] of query [B, H, T, d] over key [B, G, S, d] and value [B, G, S, v].

    Args:
        key, value: from a stock MLA module under `accelerate`, latents [B, 1, S, r] and rotated keys [B, 1, S, ρ].
        attention_mask: [B or 1, 1, T, S] as transformers builds it for SDPA, or None.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if getattr(module, PASSES_LATENTS, False):
        if is_step(module, query, query.shape[2], "mla_decode") and readable(query, module.kv_b_proj):
            return _absorbed(module, query, key, value, attention_mask, scale), None
        key, value = type(module).expand_kv(module, key, value)
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scale, **kwargs)


def _absorbed(
    module: nn.Module, query: Tensor, latent: Tensor, rope_key: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Compute a decode step of stock MLA [B, T, H, v] with the up-projections absorbed."""
    nope, width = module.qk_nope_head_dim, module.v_head_dim
    up = module.kv_b_proj.weight.view(module.num_heads, nope + width, -1)
    content, position = query.transpose(1, 2).split([nope, query.shape[-1] - nope], dim=-1)
    absorbed = torch.cat([torch.einsum("bthn,hnr->bthr", content, up[:, :nope]), position], dim=-1)
    lengths, starts = row_bounds(mask, len(query), query.shape[2], latent.shape[2], query.device)
    attn_output, _ = mla_decode(absorbed, latent[:, 0], rope_key[:, 0], scale, lengths=lengths, starts=starts)
    return torch.einsum("bthr,hvr->bthv", attn_output, up[:, nope:])
