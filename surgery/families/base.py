"""What a family file declares, and how a declaration becomes the anatomy of a layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from surgery.common.errors import SurgeryError
from surgery.families.anatomy import AttentionAnatomy, HeadNorm
from surgery.families.rope import rope_frequencies

LAYER_PREFIX = "model.layers.{layer}."
ATTENTION_PREFIX = "model.layers.{layer}.self_attn."


def no_window(config, layer: int) -> int | None:
    """Every token sees all earlier ones."""
    return None


def layer_types_window(config, layer: int) -> int | None:
    """The window of layers that ``layer_types`` calls sliding (Qwen2, Qwen3)."""
    types = getattr(config, "layer_types", None)
    return config.sliding_window if types and types[layer] == "sliding_attention" else None


def uniform_window(config, layer: int) -> int | None:
    """One window for all layers, or none (Mistral, Mixtral)."""
    return getattr(config, "sliding_window", None)


@dataclass(frozen=True)
class Family:
    """How one model family names, biases, normalises and masks its attention.

    All families here keep ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` apart under
    ``model.layers.N.self_attn`` and rotate half-split pairs; a family that does otherwise needs more fields.

    Attributes:
        model_type: the ``model_type`` of its config.json.
        qk_norm: whether each head's queries and keys pass an RMS norm before the rotation.
        window: the sliding window of a layer, from the config.
        mlp_bias: whether the config gives its feed-forward layers biases.
        experts: whether feed-forward layers are mixtures of experts, which pass through untouched.
        expert_layers: adapts a one-layer config to the feed-forward kind of the layer that it stands for.
    """

    model_type: str
    qk_norm: bool = False
    window: Callable[[object, int], int | None] = no_window
    mlp_bias: Callable[[object], bool] = lambda config: False
    experts: bool = False
    expert_layers: Callable[[object, object, int], None] = lambda single, config, layer: None

    def attention_names(self, reader, layer: int) -> list[str]:
        """The tensors of a layer's attention.

        Raises:
            SurgeryError: one is missing, or one is there that the family does not know (fused projections,
                quantisation scales, another norm): converting around it would be wrong in silence.
        """
        prefix = ATTENTION_PREFIX.format(layer=layer)
        found = [name for name in reader.names() if name.startswith(prefix)]
        required = {f"{p}_proj.weight" for p in "qkvo"}
        if self.qk_norm:
            required |= {"q_norm.weight", "k_norm.weight"}
        known = required | {f"{p}_proj.bias" for p in "qkvo"}
        present = {name.removeprefix(prefix) for name in found}
        if unknown := sorted(present - known - {"rotary_emb.inv_freq"}):
            raise SurgeryError(
                f"{prefix}{unknown[0]}: a tensor that attention of family {self.model_type!r} does not have"
            )
        if missing := sorted(required - present):
            raise SurgeryError(f"{prefix}{missing[0]}: missing from the checkpoint")
        return found

    def anatomy(self, reader, config, layer: int) -> AttentionAnatomy:
        """The anatomy of one layer, in the checkpoint's dtype on the CPU."""
        prefix = ATTENTION_PREFIX.format(layer=layer)
        names = set(self.attention_names(reader, layer))
        heads, kv_heads, head_dim = head_shape(config)

        def tensor(name: str, *shape: int) -> Tensor | None:
            if prefix + name not in names:
                return None
            value = reader.tensor(prefix + name)
            if value.numel() != math.prod(shape):
                raise SurgeryError(
                    f"{prefix}{name}: shape {tuple(value.shape)} does not fit the config, wanted {shape}"
                )
            return value.reshape(shape)

        def norm(name: str) -> HeadNorm | None:
            return HeadNorm(tensor(f"{name}.weight", head_dim), config.rms_norm_eps) if self.qk_norm else None

        hidden = config.hidden_size
        inv_freq, factor = rope_frequencies(config, head_dim)
        return AttentionAnatomy(
            q=tensor("q_proj.weight", heads, head_dim, hidden),
            k=tensor("k_proj.weight", kv_heads, head_dim, hidden),
            v=tensor("v_proj.weight", kv_heads, head_dim, hidden),
            o=tensor("o_proj.weight", hidden, heads, head_dim),
            q_bias=tensor("q_proj.bias", heads, head_dim),
            k_bias=tensor("k_proj.bias", kv_heads, head_dim),
            v_bias=tensor("v_proj.bias", kv_heads, head_dim),
            o_bias=tensor("o_proj.bias", hidden),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            inv_freq=inv_freq,
            scale=factor**2 * head_dim**-0.5,
            window=self.window(config, layer),
        )

    def single_layer_config(self, config, layer: int):
        """A copy of ``config`` for a model that holds layer ``layer`` alone, and no vocabulary."""
        single = copy.deepcopy(config)
        single.num_hidden_layers = 1
        single.vocab_size = 1
        single.pad_token_id = None
        single.tie_word_embeddings = False
        if getattr(config, "layer_types", None):
            single.layer_types = [config.layer_types[layer]]
        self.expert_layers(single, config, layer)
        return single


def head_shape(config) -> tuple[int, int, int]:
    """Query heads, key/value heads and head dimension of a config."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads % kv_heads:
        raise SurgeryError(f"config.json: {heads} query heads do not divide over {kv_heads} key/value heads")
    return heads, kv_heads, head_dim
