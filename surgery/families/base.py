"""Declaration of a model family, and reading of a layer's anatomy from its checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from surgery.common.errors import SurgeryError
from surgery.families.anatomy import AttentionAnatomy, HeadNorm
from surgery.families.renamed import Renamed
from surgery.families.rope import LONGROPE, STATIC_ROPE_TYPES, half_split_order, rope_frequencies

LAYER_PREFIX = "model.layers.{layer}."
ATTENTION_PREFIX = "model.layers.{layer}.self_attn."


def layer_types_window(config, layer: int) -> int | None:
    """Return the sliding window of layers that ``layer_types`` calls sliding (Qwen2, Qwen3); None for the rest."""
    types = getattr(config, "layer_types", None)
    return config.sliding_window if types and types[layer] == "sliding_attention" else None


def uniform_window(config, layer: int) -> int | None:
    """Return the config's sliding window, equal in all layers, or None (Mistral, Mixtral)."""
    return getattr(config, "sliding_window", None)


MTP_LAYERS = "num_nextn_predict_layers"
"""Config key of the number of MTP layers, which are stored after the model's layers."""


def is_mtp_layer(name: str, layers: int) -> bool:
    """Return whether a tensor belongs to an MTP layer: one with an index of ``layers`` or more."""
    start, prefix, rest = name.partition(LAYER_PREFIX.partition("{")[0])
    number = rest.partition(".")[0]
    return bool(prefix) and not start and number.isdecimal() and int(number) >= layers


def keeps_state(config, layer: int) -> bool:
    """Return whether a layer has linear attention by ``layer_types``: a state of fixed size, no keys and values."""
    types = getattr(config, "layer_types", None)
    return bool(types) and types[layer] == "linear_attention"


def default_scale(config) -> float:
    """Return the scale of the attention logits in most families, ``head_dim ** -0.5``."""
    return head_shape(config)[2] ** -0.5


def first_dense(single, config, layer: int) -> None:
    """Set ``first_k_dense_replace`` of a single-layer config: 1 for a dense layer, 0 for one with experts."""
    single.first_k_dense_replace = int(layer < config.first_k_dense_replace)


PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


def per_layer(config) -> tuple[str, ...]:
    """Return the names of a config's fields that have an entry per layer."""
    return tuple(name for name in PER_LAYER if getattr(config, name, None))


@dataclass(frozen=True)
class Rotation:
    """RoPE of a layer: frequencies [d/2], attention factor (YaRN, longrope) and :attr:`AttentionAnatomy.order`."""

    inv_freq: Tensor
    factor: float
    order: Tensor | None


@dataclass(frozen=True)
class Family:
    """Declaration of a model family: tensor names, norms, RoPE, scale, masks, and the layer around its attention.

    Checkpoints have ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` under ``model.layers.N.self_attn``, or are read
    under these names (``renamed``, :mod:`surgery.families.fused`).

    Attributes:
        model_type: ``model_type`` of its config.json.
        qk_norm: whether queries and keys pass an RMS norm before RoPE; None: in some checkpoints.
        norm_scope: elements under the mean of that norm: each head's, or those of all heads together.
        unit_norm: whether a layer has that norm without weights.
        stays: whether only conversions that keep the model class can change a layer's attention.
        window: sliding window of a layer, from the config; None for full attention.
        scale: factor on the attention logits, without YaRN's.
        softcap: cap of the attention logits, or None.
        sinks: whether each head has a learned sink logit.
        output_gate: whether ``q_proj`` holds, after each head's query, a gate on the head's output.
        first_scaled: first position at which queries are scaled by position, or a second attention chunk begins, or
            None. Only shorter texts are simulated; the model class itself handles longer ones.
        eager: whether a supported version of transformers leaves out a part of the attention unless it runs eagerly.
        rotates: whether a layer has RoPE.
        partial: whether its class rotates the share ``partial_rotary_factor`` of each head.
        axes: whether rotary pairs use positions of several axes (M-RoPE), which are equal in text.
        interleaved: whether rotary pairs are neighbors, (2 i, 2 i + 1), in the checkpoint.
        norm_offset: added to the stored weights of its RMS norms (1.0 for Gemma).
        layer_norm: whether the norms around the attention are LayerNorms.
        norm_eps: config key of these LayerNorms' eps.
        input_norm: name of the norm before the attention; a layer without such a module has none.
        embedding_scale: factor on token embeddings.
        extra_parts: parts of its layers, outside the attention, that stock ``deepseek_v3`` lacks; None if there are
            none.
        experts: whether feed-forward layers are mixtures of experts, which stay unchanged.
        expert_layers: adapts a single-layer config to its layer, above all to the kind of feed-forward layer.
        renamed: mapping of its tensor names to the names above, if they differ. Its class then has as many KV heads
            as query heads.
    """

    model_type: str
    qk_norm: bool | None = False
    norm_scope: Literal["head", "all"] = "head"
    unit_norm: Callable[[object, int], bool] = lambda config, layer: False
    stays: Callable[[object, int], bool] = lambda config, layer: False
    window: Callable[[object, int], int | None] = lambda config, layer: None
    scale: Callable[[object], float] = default_scale
    softcap: Callable[[object], float | None] = lambda config: None
    sinks: bool = False
    output_gate: bool = False
    first_scaled: Callable[[object], int | None] = lambda config: None
    eager: bool = False
    rotates: Callable[[object, int], bool] = lambda config, layer: True
    partial: bool = False
    axes: bool = False
    interleaved: bool = False
    norm_offset: float = 0.0
    layer_norm: bool = False
    norm_eps: str = "layer_norm_eps"
    input_norm: str = "input_layernorm"
    embedding_scale: Callable[[object], float] = lambda config: 1.0
    extra_parts: str | None = None
    experts: bool = False
    expert_layers: Callable[[object, object, int], None] = lambda single, config, layer: None
    renamed: Renamed | None = None

    def shape(self, config) -> tuple[int, int, int]:
        """Return query heads, KV heads and head dimension, from which costs are estimated."""
        return head_shape(config)

    def attention_names(self, reader, layer: int) -> list[str]:
        """Return the names of a layer's attention tensors; none for linear attention and Mamba layers.

        Raises SurgeryError: a tensor is missing, or is unknown to the family (fused projections, quantization scales,
        another norm): a conversion that ignored it would be silently wrong.
        """
        prefix = ATTENTION_PREFIX.format(layer=layer)
        names = [name for name in reader.names() if name.startswith(prefix)]
        states = tuple(LAYER_PREFIX.format(layer=layer) + module for module in ("linear_attn.", "mamba."))
        if not names and any(name.startswith(states) for name in reader.names()):
            return []
        required = {f"{p}_proj.weight" for p in "qkvo"}
        if self.qk_norm:
            required |= {"q_norm.weight", "k_norm.weight"}
        if self.sinks:
            required.add("sinks")
        optional = {"q_norm.weight", "k_norm.weight"} if self.qk_norm is None else set()
        allowed_names = required | optional | {f"{p}_proj.bias" for p in "qkvo"}
        present = {name.removeprefix(prefix) for name in names}
        if unknown := sorted(present - allowed_names - {"rotary_emb.inv_freq"}):
            raise SurgeryError(
                f"{prefix}{unknown[0]}: unexpected tensor in the attention of family {self.model_type!r}"
            )
        if missing := sorted(required - present):
            raise SurgeryError(f"{prefix}{missing[0]}: missing from the checkpoint")
        return names

    def anatomy(self, reader, config, layer: int) -> AttentionAnatomy:
        """Read the anatomy of one layer, in the checkpoint's dtype on the CPU."""
        names = self.attention_names(reader, layer)
        tensor, (heads, kv_heads, head_dim) = shaped_tensors(reader, layer, names), head_shape(config)
        rotation = self.rotation(config, layer)

        def rows(name: str, *shape: int) -> Tensor | None:
            """Read a tensor of queries, keys or their norms, [..., d, ...], in half-split order."""
            value = tensor(name, *shape)
            if value is None or rotation.order is None:
                return value
            return value.index_select(min(1, len(shape) - 1), rotation.order)

        def norm(name: str) -> HeadNorm | None:
            if self.unit_norm(config, layer):
                return HeadNorm(torch.ones(head_dim, dtype=query.dtype), config.rms_norm_eps)
            if not self.qk_norm and ATTENTION_PREFIX.format(layer=layer) + f"{name}.weight" not in names:
                return None
            count = {"q_norm": heads, "k_norm": kv_heads}[name]
            shape = (head_dim,) if self.norm_scope == "head" else (count, head_dim)
            return HeadNorm(rows(f"{name}.weight", *shape) + self.norm_offset, config.rms_norm_eps)

        def queries(kind: str, *shape: int) -> tuple[Tensor | None, Tensor | None]:
            """Read the queries in half-split order, and their gates."""
            if not self.output_gate:
                return rows(f"q_proj.{kind}", heads, head_dim, *shape), None
            both = tensor(f"q_proj.{kind}", heads, 2 * head_dim, *shape)
            if both is None:
                return None, None
            query, gate = both.split(head_dim, dim=1)
            return query if rotation.order is None else query.index_select(1, rotation.order), gate.contiguous()

        hidden = config.hidden_size
        query, gate = queries("weight", hidden)
        query_bias, gate_bias = queries("bias")
        partial = rotation.factor != 1.0 and bool((rotation.inv_freq == 0).any())
        anatomy = AttentionAnatomy(
            q=query,
            k=rows("k_proj.weight", kv_heads, head_dim, hidden),
            v=tensor("v_proj.weight", kv_heads, head_dim, hidden),
            o=tensor("o_proj.weight", hidden, heads, head_dim),
            q_bias=query_bias,
            k_bias=rows("k_proj.bias", kv_heads, head_dim),
            v_bias=tensor("v_proj.bias", kv_heads, head_dim),
            o_bias=tensor("o_proj.bias", hidden),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            inv_freq=rotation.inv_freq,
            scale=(1.0 if partial else rotation.factor**2) * self.scale(config),
            softcap=self.softcap(config),
            sinks=tensor("sinks", heads),
            gate=gate,
            gate_bias=gate_bias,
            window=self.window(config, layer),
            order=rotation.order,
            rope_factor=1.0 if partial else rotation.factor,
            partial_factor=rotation.factor if partial else 1.0,
        )
        return anatomy if not partial else anatomy.with_scaled_queries(rotation.factor**2)

    def rotation(self, config, layer: int) -> Rotation:
        """Return the RoPE of a layer's heads; the frequency of unrotated pairs is 0.

        Raises SurgeryError: a RoPE that is not supported.
        """
        head_dim, types = head_shape(config)[2], getattr(config, "layer_types", None)
        if not self.rotates(config, layer):
            return Rotation(torch.zeros(head_dim // 2, dtype=torch.float64), 1.0, None)
        kinds = (*STATIC_ROPE_TYPES, LONGROPE)
        inv_freq, factor = rope_frequencies(config, head_dim, types[layer] if types else None, kinds)
        if 2 * len(inv_freq) < head_dim and not self.partial:
            raise SurgeryError(f"config.json: partial_rotary_factor is not supported in family {self.model_type!r}")
        order = half_split_order(head_dim, 2 * len(inv_freq), interleaved=self.interleaved)
        if factor != 1.0 and 2 * len(inv_freq) < head_dim and config.rope_parameters.get("rope_type") != LONGROPE:
            raise SurgeryError(f"config.json: RoPE attention factor {factor:g} is not supported with partial rotation")
        return Rotation(torch.nn.functional.pad(inv_freq, (0, head_dim // 2 - len(inv_freq))), factor, order)

    def single_layer_config(self, config, layer: int):
        """Return a copy of ``config`` for a model of one layer, ``layer``, with a vocabulary of one token."""
        single = copy.deepcopy(config)
        single.num_hidden_layers = 1
        single.vocab_size = 1
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(single, name, None)  # transformers warns of ids outside the vocabulary
        single.tie_word_embeddings = False
        for name in per_layer(config):
            setattr(single, name, [getattr(config, name)[layer]])
        if hasattr(config, "embedding_multiplier"):
            single.embedding_multiplier = 1.0  # the inputs are scaled already, see `embedding_scale`
        self.expert_layers(single, config, layer)
        return single


def check_layers(config) -> None:
    """Raise SurgeryError unless per-layer config fields have an entry per layer and attention is causal."""
    if getattr(config, "use_bidirectional_attention", None) is True:  # Gemma's embedding models
        raise SurgeryError("config.json: use_bidirectional_attention is not supported: such a model has no KV cache")
    for name in PER_LAYER:
        entries = getattr(config, name, None)
        if entries is None:
            continue
        if not isinstance(entries, list | tuple) or len(entries) != config.num_hidden_layers:
            raise SurgeryError(f"config.json: {name} must have an entry for each of {config.num_hidden_layers} layers")


def shaped_tensors(reader, layer: int, names: Collection[str]) -> Callable[..., Tensor | None]:
    """Return a reader of a layer's attention tensors: a function of name and shape that returns the reshaped tensor.

    It returns None for a tensor that ``names`` lacks, and raises SurgeryError for one with another number of elements.
    """
    prefix = ATTENTION_PREFIX.format(layer=layer)

    def tensor(name: str, *shape: int) -> Tensor | None:
        if prefix + name not in names:
            return None
        value = reader.tensor(prefix + name)
        if value.numel() != math.prod(shape):
            raise SurgeryError(f"{prefix}{name}: shape {tuple(value.shape)} does not match the config: {shape}")
        return value.reshape(shape)

    return tensor


def head_shape(config) -> tuple[int, int, int]:
    """Return the query heads, KV heads and head dimension of a config."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads % kv_heads:
        raise SurgeryError(f"config.json: {heads} query heads must be a multiple of {kv_heads} KV heads")
    return heads, kv_heads, head_dim
