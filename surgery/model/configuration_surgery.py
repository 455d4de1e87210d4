"""Configuration of a causal language model with converted attention.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from dataclasses import fields
from typing import Any, ClassVar

import transformers
from transformers import PreTrainedConfig

from .layer_entry import LayerEntry, caches_latents
from .logit_factor import CAPPED
from .parts import KINDS, entry_of, loaded, part

# Fields of a family's config that these model classes would silently ignore, and the families that they support.
_OTHER_ATTENTION = {
    "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": CAPPED,
    "attention_chunk_size": ("llama4_text",),
}

# Fields about the config itself rather than the model, never copied from one config to another.
IDENTITY_FIELDS = ("model_type", "architectures", "auto_map", "transformers_version")

# Fields of a config in memory that `to_dict` leaves out.
RUNTIME_FIELDS = ("attn_implementation", "experts_implementation", "name_or_path", "torch_dtype")

_ATTENTION_FIELDS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")

_SIZES = {"hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"}

# Optional keys of `kv_cache`.
_KV_CACHE_OPTIONS = {"streaming_format", "sinks", "rope_format", "clip"}


class SurgeryConfig(PreTrainedConfig):
    r"""Configuration of `SurgeryForCausalLM`: the source model's config plus the attention of every layer.

    Every field of the source's config.json is an attribute under its own name, with the family's defaults filled in, so
    that caches, masks and generation find `layer_types`, `sliding_window`, `num_hidden_layers` and so on.

    Args:
        base_model_type (`str`, defaults to `"llama"`):
            `model_type` of the source model, of a family that the conversion knows: "q, k, v projections, optional
            per-head q/k-norm, RoPE over the whole head, softmax".
        attention_layers (`list[dict | None]`, *optional*):
            One entry per layer; `None` keeps the stock attention of a layer. A dictionary has the `kind` of the
            attention and the fields of its dataclass, see `parts.KINDS`.
        kv_cache (`dict | list[dict | None]`, *optional*):
            Quantizes the cache of every layer. `format` is int8, int4, int3, int2 or fp8; `group` and `window` (int)
            are those of `QuantizedKVLayer`. `keys` is `"channel"` or `"token"`: keys, or latents, share a scale among
            the tokens of a channel or the channels of a token. Streaming heads or latents are quantized token by token,
            in `streaming_format` if given. Optional: the first `sinks` (int) tokens stay in full precision;
            `rope_format`, a format or `"exact"`, is for the rotated keys of `"latent"` layers and of MLA base models;
            `clip` (bool) clips the ranges of keys, or latents, to the least squared error. A list has one dictionary
            per layer; `None` in it is a full-precision cache.
        kwargs:
            The fields of the source's config.json.
    """

    model_type = "surgery"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    base_model_type: str = "llama"
    attention_layers: list[dict[str, Any] | None] | None = None
    kv_cache: dict[str, Any] | list[dict[str, Any] | None] | None = None

    def __post_init__(self, **kwargs):
        if self.base_model_type not in transformers.CONFIG_MAPPING:
            raise ValueError(f"base_model_type {self.base_model_type!r} is not supported by the installed transformers")
        # Passed to super(), not to the base config.
        runtime = {name: kwargs.pop(name) for name in RUNTIME_FIELDS if name in kwargs}
        # The family's own class fills in its defaults and translates legacy fields such as rope_theta and rope_scaling.
        source = {name: value for name, value in kwargs.items() if name not in IDENTITY_FIELDS}
        base_config = transformers.CONFIG_MAPPING[self.base_model_type](**source)
        base = base_config.to_dict()
        # Sizes get the names that most families use.
        for name in _SIZES & base_config.attribute_map.keys():
            base[name] = base.pop(base_config.attribute_map[name])
        for name, families in _OTHER_ATTENTION.items():
            if base.get(name) is not None and self.base_model_type not in families:
                raise ValueError(f"base_model_type {self.base_model_type!r} has {name}, which is not supported")
        own = {field.name for field in fields(self)} | set(IDENTITY_FIELDS)
        inherited = {name: value for name, value in base.items() if name not in own}
        if "auto_map" in kwargs:
            runtime["auto_map"] = kwargs["auto_map"]
        super().__post_init__(**inherited, **runtime)
        # PreTrainedConfig drops generation settings; keep those that the family declares as fields (use_cache).
        for name in inherited.keys() - self.__dict__.keys():
            setattr(self, name, inherited[name])
        check_config(self)

    def kv_cache_of(self, layer: int) -> dict[str, Any] | None:
        """Return the `kv_cache` entry of a layer; None for a full-precision cache."""
        return self.kv_cache[layer] if isinstance(self.kv_cache, list) else self.kv_cache

    def streaming_codes(self, layer: int = 0) -> Any:
        """Return the `TokenCodes` that quantize a layer's streaming heads; None in full precision.

        Raises:
            ValueError: `kv_cache` is invalid.
        """
        kv_cache = self.kv_cache_of(layer)
        return kv_cache and part("token_codes").TokenCodes.of(kv_cache)

    def quantized_layer(self, layer: int = 0) -> Any:
        """Make the `QuantizedKVLayer` of a layer from `kv_cache` and `attention_layers`; None in full precision.

        Raises:
            ValueError: `kv_cache` is invalid.
        """
        kv_cache = self.kv_cache_of(layer)
        if kv_cache is None:
            return None
        entry = entry_of(self.attention_layers and self.attention_layers[layer])
        latent = entry.has_rope_part or (entry.kind is None and caches_latents(self))
        rope_format = kv_cache.get("rope_format") if latent else None
        whole = (kv_cache[name] for name in ("format", "group", "window", "keys"))
        quantized = part("quantized_cache").QuantizedKVLayer
        return quantized(*whole, kv_cache.get("sinks", 0), rope_format, entry.codes or (), kv_cache.get("clip", False))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Build a config like transformers, but drop its `attn_implementation`; see `without_attention`."""
        return super().from_dict(without_attention(config_dict), **kwargs)

    @classmethod
    def from_base(
        cls, base: PreTrainedConfig | dict[str, Any], attention_layers: list[dict[str, Any] | None], **kwargs
    ) -> "SurgeryConfig":
        """Build the configuration from the source's own config object or the content of its config.json."""
        source = dict(base) if isinstance(base, dict) else base.to_dict()
        base_model_type = source["model_type"]
        source = {name: value for name, value in source.items() if name not in IDENTITY_FIELDS}
        architectures = ["SurgeryForCausalLM"]
        return cls(
            base_model_type=base_model_type,
            attention_layers=attention_layers,
            **{**source, "architectures": architectures, **kwargs},
        )

    def base_config(self) -> PreTrainedConfig:
        """Return the base family's own configuration, as its stock decoder expects it."""
        own = {"base_model_type", "attention_layers", "kv_cache", *IDENTITY_FIELDS}
        source = {name: value for name, value in self.to_dict().items() if name not in own}
        return transformers.CONFIG_MAPPING[self.base_model_type](
            **source,
            attn_implementation=self._attn_implementation,
            experts_implementation=self._experts_implementation,
        )


def check_config(config: PreTrainedConfig) -> None:
    """Check `attention_layers` and `kv_cache`, as far as the parts of their kinds are loaded.

    A config loaded alone has no parts. transformers imports configs and models into separate packages, so the model,
    whose entry module imports the parts, checks again.

    Raises:
        ValueError: an invalid entry.
    """
    if config.attention_layers is not None:
        _check_attention_layers(config)
    if config.kv_cache is not None:
        _check_kv_cache(config)


def _check_attention_layers(config: PreTrainedConfig) -> None:
    layers = config.attention_layers
    if len(layers) != config.num_hidden_layers:
        raise ValueError(f"attention_layers has {len(layers)} entries, must have {config.num_hidden_layers}")
    if not all(entry is None or loaded(KINDS.get(entry.get("kind"), ("parts",))[0]) for entry in layers):
        return
    entries: list[LayerEntry] = []
    for index, entry in enumerate(layers):
        try:
            entries.append(entry_of(entry))
        except ValueError as error:
            raise ValueError(f"attention_layers[{index}]: {error}") from None
    for index, entry in enumerate(entries):
        if entry.kind and (problem := _family_problem(config, entry) or entry.problem(config, index, entries)):
            raise ValueError(f"attention_layers[{index}]: {problem}")


def _family_problem(config: PreTrainedConfig, entry: LayerEntry) -> str | None:
    return f"{entry.kind} does not fit a base model with MLA" if caches_latents(config) else None


def _check_kv_cache(config: PreTrainedConfig) -> None:
    layers = config.num_hidden_layers if config.attention_layers or isinstance(config.kv_cache, list) else 1
    if isinstance(config.kv_cache, list) and len(config.kv_cache) != layers:
        raise ValueError(f"kv_cache has {len(config.kv_cache)} entries, must have {layers}")
    for layer in range(layers):
        kv_cache = config.kv_cache_of(layer)
        if kv_cache is None:
            continue
        if set(kv_cache) - _KV_CACHE_OPTIONS != {"format", "group", "window", "keys"}:
            raise ValueError(f"kv_cache has keys {sorted(kv_cache)}; format, group, keys and window are required")
        if loaded("quantized_cache"):
            SurgeryConfig.quantized_layer(config, layer)
            SurgeryConfig.streaming_codes(config, layer)


def without_attention(config: dict[str, Any]) -> dict[str, Any]:
    """Copy the content of a config.json without `attn_implementation`, in nested configs too.

    Only the caller may choose it: a config.json could name a kernel of the Hub, whose code would then run.
    """
    values = {name: value for name, value in config.items() if name not in _ATTENTION_FIELDS}
    return {name: without_attention(value) if isinstance(value, dict) else value for name, value in values.items()}
