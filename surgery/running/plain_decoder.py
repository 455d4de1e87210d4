"""Plain decoders: models that config.json and tensor names fully describe, without a transformers class.

Importing the classes of a family in transformers takes twice as long as importing torch. The most common checkpoints
need none: Llama, and families that differ only by biases or QK norms, without windows. :func:`plain_config` and
:func:`is_plain` check every key and tensor; everything else is left to transformers, which also reports damage.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedConfig

from surgery.checkpoint import CheckpointReader
from surgery.families.base import ATTENTION_PREFIX, LAYER_PREFIX
from surgery.model.configuration_surgery import SurgeryConfig, check_config


@dataclass(frozen=True)
class PlainFamily:
    """Family of plain decoders.

    ``required`` config keys must be present in addition to sizes, since the class has defaults for them; ``biases`` are
    attention projections with a bias; ``has_norms``: whether queries and keys have a norm per head.
    """

    class_name: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    has_norms: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Config keys of this family in addition to the common ones."""
        return self.required + self.optional


WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
FAMILIES = {
    "llama": PlainFamily("LlamaForCausalLM", (), ("head_dim", "attention_bias", "mlp_bias", "pretraining_tp")),
    "mistral": PlainFamily("MistralForCausalLM", ("sliding_window",), ("head_dim",)),
    "qwen2": PlainFamily("Qwen2ForCausalLM", (), WINDOWS, biases=("q_proj", "k_proj", "v_proj")),
    "qwen3": PlainFamily("Qwen3ForCausalLM", ("head_dim",), ("attention_bias", *WINDOWS), has_norms=True),
}
"""Families by ``model_type``."""

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)
REQUIRED = (*SIZES, "rms_norm_eps", "hidden_act")
ROPE = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
CONVERTED = ("attention_layers", "kv_cache", "base_model_type", "auto_map")
"""Keys that a custom-class config.json adds to its source's."""


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_off(value: Any) -> bool:
    return value is None or value is False


def _is_token(value: Any) -> bool:
    return value is None or all(type(each) is int and each >= 0 for each in (value if type(value) is list else [value]))


def _is_rope(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None
    numbers = {name: number for name, number in value.items() if name not in ("rope_type", "type")}
    kind = value.get("rope_type", value.get("type"))
    return kind in ("default", "llama3") and numbers.keys() <= {*ROPE} and all(map(_is_number, numbers.values()))


RULES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys((*SIZES, "head_dim", "max_window_layers"), _is_count),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "attention_dropout", "initializer_range"), _is_number),
    **dict.fromkeys(("use_cache", "tie_word_embeddings", "is_llama_config"), _is_bool),
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "rope_interleaved", "use_sliding_window", "sliding_window"), _is_off
    ),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _is_token),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _is_rope),
    **dict.fromkeys(("model_type", "transformers_version", "_name_or_path"), _is_text),
    **dict.fromkeys(("dtype", "torch_dtype"), lambda value: value in ("float32", "float16", "bfloat16")),
    "layer_types": lambda value: isinstance(value, list) and all(kind == "full_attention" for kind in value),
    "hidden_act": lambda value: value == "silu",
    "pretraining_tp": lambda value: value == 1,
    "architectures": lambda value: isinstance(value, list),
}
"""Validators of a plain decoder's config values by key; a config with any other key is not plain."""

OF_FAMILIES = {key for family in FAMILIES.values() for key in family.keys}


class PlainConfig(PreTrainedConfig):
    """Config of a plain decoder, with the attributes that its family's config class would have."""

    vocab_size: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    max_position_embeddings: int | None = None  # transformers reads these to standardize RoPE parameters
    rope_parameters: dict | None = None
    use_cache: bool = True


class PlainConfigOfHeads(PlainConfig):
    """Config of a plain decoder whose config class declares ``head_dim``."""

    head_dim: int | None = None


class PlainConvertedConfig(PlainConfig):
    """Config of a plain decoder with converted attention, in place of a `SurgeryConfig`."""

    base_model_type: str = "llama"
    attention_layers: list | None = None
    kv_cache: dict | list | None = None
    kv_cache_of = SurgeryConfig.kv_cache_of


def plain_config(config: Mapping[str, Any]) -> PlainConfig | None:
    """Build the config of a plain decoder; None if it needs the transformers class."""
    values = _attributes(config)
    if values is None:
        return None
    return _config_class(config["model_type"])(**values)


@cache
def _config_class(model_type: str) -> type[PlainConfig]:
    base = PlainConfigOfHeads if "head_dim" in FAMILIES[model_type].keys else PlainConfig
    return type(base.__name__, (base,), {"model_type": model_type})


def plain_converted_config(config: Mapping[str, Any]) -> PlainConvertedConfig | None:
    """Build and check the config of a plain decoder with converted attention; None if the source is not plain.

    Raises ValueError: an entry is invalid.
    """
    own = {name: config[name] for name in CONVERTED if name in config and name != "auto_map"}
    source = {name: value for name, value in config.items() if name not in (*CONVERTED, "architectures")}
    values = _attributes({**source, "model_type": own.get("base_model_type")})
    if values is None:
        return None
    plain = PlainConvertedConfig(**values, **own)
    check_config(plain)
    return plain


def _attributes(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the attributes for a plain decoder's config; None if the config is not plain."""
    family = FAMILIES.get(config["model_type"]) if _is_text(config.get("model_type")) else None
    if family is None or not {*REQUIRED, *family.required} <= config.keys():
        return None
    keys = RULES.keys() - OF_FAMILIES | {*family.keys}
    if not all(name in keys and RULES[name](value) for name, value in config.items()):
        return None
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if hidden % heads or heads % kv_heads or "rope_theta" not in {**config, **rope}:
        return None
    if config.get("architectures", [family.class_name]) != [family.class_name]:
        return None
    values = {name: copy.deepcopy(value) for name, value in config.items() if name not in ("model_type", *WINDOWS)}
    values.setdefault("tie_word_embeddings", False)
    if "head_dim" in family.keys:
        values.setdefault("head_dim", hidden // heads)
    if "sliding_window" in family.keys:
        values["sliding_window"] = None
    if "layer_types" in family.keys:
        values["layer_types"] = config.get("layer_types") or ["full_attention"] * layers
    return values if len(values.get("layer_types", range(layers))) == layers else None


def is_plain(reader: CheckpointReader) -> bool:
    """Return whether a checkpoint is a plain decoder with exactly the tensors and shapes of its class."""
    config = plain_config(reader.config)
    if config is None:
        return False
    infos = {name: reader.info(name) for name in reader.names()}
    floating = all(info.dtype in (torch.float32, torch.float16, torch.bfloat16) for info in infos.values())
    shapes = {name: tuple(info.shape) for name, info in infos.items()}
    return floating and config.num_hidden_layers <= len(infos) and shapes == _shapes(config)


def _shapes(config: PlainConfig) -> dict[str, tuple[int, ...]]:
    family, hidden, wide = FAMILIES[config.model_type], config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    attention = {f"{name}.weight": (count, hidden) for name, count in rows.items()} | {
        "o_proj.weight": (hidden, queries)
    }
    attention |= {f"{name}.bias": (rows[name],) for name in family.biases}
    if family.has_norms:
        attention |= {"q_norm.weight": (head_dim,), "k_norm.weight": (head_dim,)}
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index in range(config.num_hidden_layers):
        shapes |= {LAYER_PREFIX.format(layer=index) + name: shape for name, shape in layer.items()}
        shapes |= {ATTENTION_PREFIX.format(layer=index) + name: shape for name, shape in attention.items()}
    return shapes
