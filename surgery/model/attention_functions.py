"""Functions and base classes shared by the attention modules of the custom model class.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig

from .layer_entry import LayerEntry
from .step_memo import once

SCALED_QUERIES = ("ministral3", "llama4_text")
"""Families that scale queries by position; Llama 4 does so in layers without RoPE."""


def own_softmax(config: PreTrainedConfig) -> bool:
    """Return whether a model's attention caps logits or has learned sinks, which PyTorch's fused kernels lack."""
    return getattr(config, "attn_logit_softcapping", None) is not None or has_learned_sinks(config)


def has_learned_sinks(config: PreTrainedConfig) -> bool:
    """Return whether a family's attention has learned `sinks`: one extra logit per head in the softmax.

    The mark of such a family is that its class in transformers does not support SDPA, but has no setting of a cap.
    """
    family = getattr(config, "base_model_type", config.model_type)
    return not hasattr(config, "attn_logit_softcapping") and _lacks_sdpa(family)


@cache
def _lacks_sdpa(family: str) -> bool:
    from transformers import CONFIG_MAPPING, MODEL_MAPPING  # late: slow to import

    decoder = MODEL_MAPPING.get(CONFIG_MAPPING[family], None) if family in CONFIG_MAPPING else None
    return decoder is not None and not decoder._supports_sdpa


def has_output_gate(attention: nn.Module) -> bool:
    """Return whether the family's `q_proj` also computes, after each head's query, a gate of the head's output."""
    return attention.q_proj.out_features == 2 * attention.config.num_attention_heads * attention.head_dim


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute plain attention, `softmax(scaling · q kᵀ + mask) v`, with K ≤ H KV heads.

    query [B, H, T, e], key [B, K, S, e], value [B, K, S, v], additive mask [B, 1, T, S]
    → out [B, T, H, v], weights [B, H, T, S].

    With a `softcap` c the scores become `c tanh(scores / c)` before the mask is added. `s_aux` [H] are the logits of
    learned sinks, which take part in the softmax but have no value.
    """
    batch, num_heads, num_queries, _ = query.shape
    num_kv_heads = key.shape[1]
    # Query heads that share a KV head become rows of one matrix, so that no key is repeated in memory.
    query = query.reshape(batch, num_kv_heads, -1, query.shape[-1])
    scores = (query @ key.transpose(-1, -2) * scaling).view(batch, num_heads, num_queries, -1)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if attention_mask is not None:
        scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), dim=-1)
    softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = nn.functional.softmax(scores, dim=-1, dtype=softmax_dtype).to(query.dtype)
    if s_aux is not None:
        weights = weights[..., :-1]
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    out = weights.reshape(batch, num_kv_heads, -1, weights.shape[-1]) @ value
    return out.view(batch, num_heads, num_queries, -1).transpose(1, 2).contiguous(), weights


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention with the config's current `attn_implementation`; shapes as in `eager_attention`.

    `module` has `config` (with a logit softcap, if any), `scaling`, `attention_dropout` and the family's learned
    `sinks`. Only eager attention returns weights.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # late: slow to import, and loaded by any model

    attention = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager_attention)
    dropout = module.attention_dropout if module.training else 0.0
    if (cap := getattr(module.config, "attn_logit_softcapping", None)) is not None:
        kwargs["softcap"] = cap
    if isinstance(sinks := getattr(module, "sinks", None), torch.Tensor):
        kwargs["s_aux"] = sinks
    width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    if missing and is_flash(module.config._attn_implementation):  # needs values as wide as keys
        value = nn.functional.pad(value, (0, missing))
    out, weights = attention(
        module, query, key, value, attention_mask, dropout=dropout, scaling=module.scaling, **kwargs
    )
    return out[..., :width], weights


def is_flash(implementation: str | None) -> bool:
    """Return whether a name means FlashAttention, installed or a kernel from the Hub (its name has a "/")."""
    return implementation is not None and (implementation.startswith("flash_attention_") or "/" in implementation)


def visible_mask(module: nn.Module, visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a mask [·, T, S], true where a key is visible, for `attend`: eager attention needs an additive one."""
    if module.config._attn_implementation != "eager":
        return visible
    least = torch.finfo(dtype).min
    return once(visible, dtype, lambda: torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, least))


def take(tensor: torch.Tensor, indices: list[int] | None, dim: int) -> torch.Tensor:
    """Select entries along a dimension, in the order of `indices`; None selects all.

    Contiguous runs are sliced and concatenated: an index tensor would be copied to the device at every step.
    """
    if indices is None:
        return tensor
    runs = [slice(indices[0], indices[0] + 1)] if indices else []
    for index in indices[1:]:
        if index == runs[-1].stop:
            runs[-1] = slice(runs[-1].start, index + 1)
        else:
            runs.append(slice(index, index + 1))
    parts = [tensor.narrow(dim, run.start, run.stop - run.start) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


class ConvertedAttention:
    """Mixin of attention modules that replace a family's own; their constructors take that module and an entry."""

    @classmethod
    def cache_layer_of(cls, entry: LayerEntry, whole: Any, codes: Any) -> Any:
        """Make an empty cache layer from one for all tokens; `codes` (`TokenCodes`) quantize streaming heads."""
        return whole

    def initialize_weights(self) -> None:
        """Initialize tensors that the base model does not have; loaded tensors stay unchanged."""

    def connect(self, decoder: nn.Module, shared_latents: dict[int, torch.Tensor]) -> None:
        """Store references to what layers share: the rotary embedding, and latents that other layers read."""


class Accelerated(ConvertedAttention):
    """Mixin of attention modules whose attention a fused kernel can compute.

    Attributes:
        kernel: set by `surgery.accelerate`, never saved; None runs the module's own code. It is called with the module
            as first argument. It updates the cache and returns the outputs, or returns None and leaves the cache alone.
    """

    kernel: Callable[..., torch.Tensor | None] | None = None


def begin_as(module: nn.Module, stock: nn.Module) -> None:
    """Initialize a module that replaces a family's attention: copy sizes, scale and dropout of `stock`."""
    # Not super(): the class built by `family_attention_class` has the family's attention next in line.
    nn.Module.__init__(module)
    module.config, module.layer_idx, module.is_causal = stock.config, stock.layer_idx, True
    module.num_heads, module.num_kv_heads = stock.config.num_attention_heads, stock.config.num_key_value_heads
    module.head_dim, module.scaling = stock.head_dim, stock.scaling
    module.attention_dropout = stock.attention_dropout


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Multiply x_{2i} + j·x_{2i+1} by e^{jθ_i m}: x [B, h, T, ρ], cos and sin [B, 1, T, ρ/2] in fp32."""
    real, imag = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack((real * cos - imag * sin, real * sin + imag * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def project_queries(module: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return normalized queries [B, T, H, d] of [B, T, D] before rotation, and the gate for `gated` or None."""
    query, gate = module.q_proj(hidden_states).unflatten(-1, (module.num_heads, -1)), None
    if query.shape[-1] == 2 * module.head_dim:
        query, gate = query.chunk(2, dim=-1)
    return normalize_heads(module.q_norm, query), gate


def scaled_by_position(
    module: nn.Module, query: torch.Tensor, position_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Scale queries [B, H, T, d] by 1 + β log(1 + ⌊p / L⌋) at positions p [B, T] in the `SCALED_QUERIES` families.

    β and L are `llama_4_scaling_beta` and `original_max_position_embeddings` of the config's `rope_parameters`.
    Llama 4 calls them `attn_scale` and `floor_scale`, and counts positions from 1.
    """
    config = module.config
    if config.model_type not in SCALED_QUERIES or not getattr(config, "attn_temperature_tuning", True):
        return query
    positions = position_ids[:, None, :, None]
    if config.model_type == "llama4_text":
        beta, periods = config.attn_scale, ((positions + 1) / config.floor_scale).floor()
    else:
        rope = config.rope_parameters
        beta, periods = rope["llama_4_scaling_beta"], (positions / rope["original_max_position_embeddings"]).floor()
    return query * (1 + beta * periods.log1p()).to(query.dtype)


def cache_positions(module: nn.Module, hidden_states: torch.Tensor, cache: Cache | None) -> torch.Tensor:
    """Return the cache positions [1, T] of tokens [B, T, D], padding included, for families that pass none down."""
    past_length = 0 if cache is None else cache.get_seq_length(module.layer_idx)
    return torch.arange(hidden_states.shape[1], device=hidden_states.device)[None] + past_length


def gated(attn_output: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Multiply attention outputs [B, T, H, d] by the sigmoid of their gate, if any."""
    return attn_output if gate is None else attn_output * gate.sigmoid()


def normalize_heads(norm: nn.Module | None, heads: torch.Tensor, at: int = -2) -> torch.Tensor:
    """Apply the family's query or key norm, per head or over all heads, to heads [..., H, d]; no-op without one.

    `at` is the head dimension, if it is not the second last.
    """
    if norm is None:
        return heads
    if norm_width(norm) == heads.shape[-1]:
        return norm(heads)
    heads = heads.transpose(at, -2)
    return norm(heads.flatten(-2)).unflatten(-1, heads.shape[-2:]).transpose(at, -2)


def norm_width(norm: nn.Module) -> int:
    """Return the size of a norm's weight; ZeRO-3 empties weights between calls and keeps the size in `ds_shape`."""
    return getattr(norm.weight, "ds_shape", norm.weight.shape)[0]


@cache
def family_attention_class(own: type[nn.Module], family: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `own` and of the family's class, by which transformers collects `output_attentions`."""
    return type(own.__name__, (own, family), {"__module__": own.__module__, "__reduce__": _reduce})


def _reduce(module: nn.Module) -> tuple:
    return _unpickled, _importable_bases(type(module)), module.__dict__


def _importable_bases(cls: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    """Return the classes, importable by name, that a class was combined from; itself, if importable."""
    if vars(cls).get("__reduce__") is not _reduce:
        return (cls,)
    own, family = cls.__bases__
    return (own, *_importable_bases(family))


def _unpickled(*classes: type[nn.Module]) -> nn.Module:
    """Make an empty instance of a class combined by `family_attention_class`, which pickle cannot import."""
    cls = reduce(lambda family, own: family_attention_class(own, family), reversed(classes))
    return cls.__new__(cls)
