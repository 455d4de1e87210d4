"""RoPE of a family's heads, and access to the decoder's rotary embedding for attention that rotates keys on read.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig

from .attention_functions import normalize_heads


class NoRotation(nn.Module):
    """Rotary embedding for models without RoPE."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return empty cos and sin [B, T, 0] of position_ids [B, T]."""
        nothing = x.new_empty(*position_ids.shape, 0)
        return nothing, nothing


def rotary_of(decoder: nn.Module) -> nn.Module:
    """Return the rotary embedding of a decoder, or `NoRotation`."""
    return NoRotation() if decoder.rotary_emb is None else decoder.rotary_emb


def connect_rotary(attention: nn.Module, decoder: nn.Module) -> None:
    """Store a decoder's rotary embedding on an attention module, in a tuple so that it is not registered as a child."""
    # Some families have separate frequencies for each layer type, and pass the type.
    arguments = {"layer_type": kind} if (kind := getattr(attention, "rope_of", None)) else {}
    rotary = rotary_of(decoder)
    attention.rotary = (partial(rotary, **arguments) if arguments else rotary,)


def rotation_of(stock: nn.Module) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the family's RoPE function: x [B, h, T, d], cos and sin [B or 1, T, ρ] → [B, h, T, d].

    The pairing of channels is the family's. Channels after the first ρ, and layers without RoPE, stay unchanged.
    """
    if not has_rope(stock.config, stock.layer_idx):
        return unrotated
    modules = (sys.modules[cls.__module__] for cls in type(stock).__mro__)
    family = next(module for module in modules if hasattr(module, "apply_rotary_pos_emb"))
    one_angle_a_pair = hasattr(family, "_apply_rotary_emb")  # of gpt-oss, and of families with its functions
    return partial(_rotated, family.apply_rotary_pos_emb, 2 if one_angle_a_pair else 1)


def has_rope(config: PreTrainedConfig, layer: int) -> bool:
    """Return whether a layer has RoPE, by the family's config.

    Conversions write `no_rope_layers`, 1 where a layer has RoPE, for families where the other fields do not say so.
    """
    if layers := getattr(config, "no_rope_layers", None):
        return bool(layers[layer])
    if config.model_type == "cohere2":  # its converted checkpoints have no `no_rope_layers`
        return config.layer_types[layer] == "sliding_attention"
    with_rope = getattr(config, "position_embedding_type", "rope") == "rope"  # of Granite 4
    return with_rope and getattr(config, "rope_parameters", None) is not None


def unrotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x


def _rotated(apply: Callable, numbers: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = numbers * cos.shape[-1]  # one cosine per channel, or per pair of channels
    whole = width == x.shape[-1]
    turned = x if whole else x[..., :width]
    turned, _ = apply(turned, turned[:, :0], cos, sin)  # takes queries and keys; ours may be of different tokens
    return turned if whole else torch.cat((turned, x[..., width:]), dim=-1)


def project_heads(
    module: nn.Module, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the family's rotated queries [B, H, T, d], rotated keys and values [B, G, T, d] of [B, T, D]."""
    cos, sin = position_embeddings or (None, None)
    query, key, value = (
        projection(hidden_states).unflatten(-1, (-1, module.head_dim))
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        query, key = normalize_heads(module.q_norm, query), normalize_heads(module.k_norm, key)
    query, key = (module.rotate(heads.transpose(1, 2), cos, sin) for heads in (query, key))
    return query, key, value.transpose(1, 2)


def rotates_plainly(module: nn.Module) -> bool:
    """Return whether a head rotates all pairs (i, i + d/2), the only form that the kernels support."""
    rotation, rotary = module.rotate, module.rotary[0]
    if not isinstance(rotation, partial) or not hasattr(rotary, "inv_freq"):
        return False
    row = torch.arange(float(module.head_dim)).view(1, 1, 1, -1)
    half = rotation(row, torch.zeros(1, 1, 2 * len(rotary.inv_freq)), torch.ones(1, 1, 2 * len(rotary.inv_freq)))
    return torch.equal(half, torch.cat((-row[..., module.head_dim // 2 :], row[..., : module.head_dim // 2]), dim=-1))
