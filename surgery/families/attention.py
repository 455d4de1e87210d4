"""Reference attention of the source on the family-neutral anatomy, which conversions are fitted to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surgery.families.anatomy import AttentionAnatomy, LayerAnatomy, Projection
from surgery.families.latent_anatomy import LatentAnatomy, LatentProjection
from surgery.families.rope import phases, rotate
from surgery.kernels.mla_decode.reference import causal_mask


def rotated_heads(anatomy: AttentionAnatomy, projection: Projection) -> tuple[Tensor, Tensor, Tensor]:
    """Return a prompt's queries, keys and values [B, H, T, ·] after RoPE, KV heads repeated."""
    repeat, (q, k) = anatomy.heads // anatomy.kv_heads, _rotated(anatomy, projection)
    k, v = (x.repeat_interleave(repeat, dim=2) for x in (k, projection.v))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def cached_heads(anatomy: AttentionAnatomy, projection: Projection) -> tuple[Tensor, Tensor, Tensor]:
    """Return a prompt's queries [B, H, T, ·] after RoPE, and keys and values [B, G, T, ·] as cached."""
    q, k = _rotated(anatomy, projection)
    return q.transpose(1, 2), k.transpose(1, 2), projection.v.transpose(1, 2)


def _rotated(anatomy: AttentionAnatomy, projection: Projection) -> tuple[Tensor, Tensor]:
    """Apply RoPE to queries [B, T, H, d] and keys [B, T, G, d], then the keys' gain."""
    phase = phases(
        anatomy.inv_freq, torch.arange(projection.q.shape[1], device=projection.q.device), projection.q.dtype
    )
    q, k = rotate(projection.q, phase), rotate(projection.k, phase)
    return q, k if projection.key_gain is None else k * projection.key_gain[..., None]


def attend(anatomy: LayerAnatomy, projection: Projection) -> Tensor:
    """Compute a causal prompt's attention outputs per head, [B, T, H, e]."""
    if isinstance(anatomy, LatentAnatomy):
        return _attend_latents(anatomy, projection)
    return causal_attention(anatomy, *rotated_heads(anatomy, projection)).transpose(1, 2)


def _attend_latents(anatomy: LatentAnatomy, projection: LatentProjection) -> Tensor:
    queries, latent, rotated = latent_cache(anatomy, projection)
    return anatomy.softmax.mix(queries, *expanded_heads(anatomy, latent, rotated)).transpose(1, 2)


def latent_cache(anatomy: LatentAnatomy, projection: LatentProjection, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries [B, H, T, n + ρ], latents [B, 1, T, r] and rotary keys [B, 1, T, ρ] of MLA.

    Latents and rotary keys are the cache; tokens stand at positions from ``first`` on.
    """
    positions = first + torch.arange(projection.q.shape[1], device=projection.q.device)
    phase = phases(anatomy.inv_freq, positions, projection.q.dtype) * anatomy.rope_factor
    queries = torch.cat([projection.unrotated, rotate(projection.q, phase)], dim=-1)
    queries, latent, rotated = (x.transpose(1, 2) for x in (queries, projection.v, rotate(projection.k, phase)))
    return queries, latent, rotated


def expanded_heads(anatomy: LatentAnatomy, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Expand cached latents and rotary keys to keys [B, H, T, n + ρ] and values [B, H, T, e]."""
    key, value = (x.transpose(1, 2) for x in anatomy.expanded(latent[:, 0]))
    return torch.cat([key, rotated.expand(*key.shape[:-1], -1)], dim=-1), value


def causal_attention(anatomy: AttentionAnatomy, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention [B, H, T, e] of a prompt over keys and values [B, G, T, ·], within the window."""
    tokens, window = q.shape[2], anatomy.window
    windowed = window is not None and window < tokens
    return anatomy.softmax.mix(q, k, v, causal_mask(tokens, tokens, window, q.device) if windowed else None)


def attention_weights(anatomy: AttentionAnatomy, projection: Projection) -> Tensor:
    """Compute a causal prompt's softmax weights [B, H, T, T]; quadratic memory, so one sequence at a time."""
    q, k, _ = rotated_heads(anatomy, projection)
    visible = causal_mask(q.shape[2], q.shape[2], anatomy.window, q.device)
    return anatomy.softmax.weights(q @ k.mT, visible)


def output(anatomy: LayerAnatomy, attn_output: Tensor, inputs: Tensor) -> Tensor:
    """Apply the gate, computed from ``inputs`` [B, T, D], and the output projection to [B, T, H, e]; [B, T, D]."""
    return nn.functional.linear(anatomy.gated(attn_output, inputs).flatten(2), anatomy.o.flatten(1), anatomy.o_bias)


class CapturedAttention(nn.Module):
    """Surrogate for a transformers attention module that computes the same output and stores its projections.

    With ``gradients`` the stored keys and values retain the gradients of a later backward pass.
    """

    def __init__(self, anatomy: LayerAnatomy, *, gradients: bool = False):
        super().__init__()
        self.anatomy, self.gradients = anatomy, gradients
        self.inputs: Tensor | None = None
        self.projection: Projection | None = None
        self.outputs: Tensor | None = None

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        self.inputs = hidden_states.detach()
        self.projection = self.anatomy.project(hidden_states)
        if self.gradients:
            self.projection.k.retain_grad()
            self.projection.v.retain_grad()
        self.outputs = output(self.anatomy, attend(self.anatomy, self.projection), hidden_states)
        return self.outputs, None
