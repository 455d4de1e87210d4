"""Properties of a checkpoint's config.json that determine whether an engine loads it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from surgery.checkpoint.config_file import with_legacy_rope_keys
from surgery.checkpoint.kv_widths import kv_widths
from surgery.common.size_names import with_size_names
from surgery.model.layer_entry import head_dim_of
from surgery.model.quantized_latent_entry import QuantizedLatentEntry
from surgery_vllm.row_layout import row_bytes
from surgery_vllm.structure import SERVED, NotServed, attention_of_layers, windowed

MLA, HEADS, OWN = "deepseek_v3", "heads", "surgery"
PICTURES = "surgery_pictures"
"""Model type of the custom model class inside a vision-language model."""
OWN_CLASSES = OWN, PICTURES

PLAIN = ("llama", "mistral")
"""Families whose attention is plain QKV with RoPE, so that a conversion to MLA runs in every engine."""
YARN_OPTIONS = ("attention_factor", "mscale", "mscale_all_dim", "truncate")
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Facts:
    """Properties of a checkpoint that engines depend on.

    Attributes:
        structure: MLA (stock ``deepseek_v3``), HEADS (a family's stock class), or OWN, this package's class.
        family: model_type of the config; ``base``: for the custom model class, that of its source.
        cached_numbers: elements per token over all layers, with unlimited windows; None for structures of the custom
            model class that only transformers runs.
        packed_bytes: additional bytes per token over all layers, in any dtype: packed rows of MLA and low rank in bits.
        unpacked_numbers: additional elements per token of one layer, which CUDA kernels unpack from MLA in bits.
        streamed_numbers: additional elements per request: sinks and window of streaming heads in a longer request, and
            first tokens in full precision.
        number_bytes: bytes per weight element.
        head_sizes: MLA only: (nope, rope, value) dims of a head.
        width: MLA only: elements per token and layer in the cache, rank + rope dims.
        biases: MLA only: whether the attention projections have biases.
        frequency_list: MLA only: whether RoPE frequencies are a list, neither default RoPE nor YaRN.
        yarn: MLA only: whether RoPE is YaRN: DeepSeek's models, and conversions of them.
        rope: RoPE type, with the options that change YaRN's scale or frequencies.
        real_experts: MLA only: whether there are MoE layers; again DeepSeek's models, and conversions of them.
        tied: whether the output head is tied to the embeddings.
        has_legacy_rope_keys: whether RoPE is also given in transformers 4's keys, next to ``rope_parameters``.
        windowed: whether any layer has a sliding window; of the source in the custom model class.
        quantized: whether weights are stored quantized, which no trial covers.
        pictures: whether this is a vision-language model; its language model has the cache.
        served: custom model class only: name of its trials in our vLLM plugin.
        not_served: custom model class only: feature that the plugin lacks; None if it serves the checkpoint.
    """

    structure: str
    family: str
    cached_numbers: int | None
    number_bytes: int
    activation: str
    base: str | None = None
    packed_bytes: int = 0
    unpacked_numbers: int = 0
    streamed_numbers: int = 0
    head_sizes: tuple[int, int, int] | None = None
    width: int | None = None
    biases: bool = False
    frequency_list: bool = False
    yarn: bool = False
    rope: str = "default"
    real_experts: bool = False
    tied: bool = False
    has_legacy_rope_keys: bool = False
    windowed: bool = False
    quantized: bool = False
    pictures: bool = False
    served: str | None = None
    not_served: str | None = None

    @classmethod
    def of(cls, config: dict[str, Any]) -> Facts:
        """Derive the facts from a config.json."""
        config = with_size_names(config)
        family = config.get("model_type", "")
        if isinstance(config.get("text_config"), dict):
            config = {**config, **_with_defaults(config["text_config"])}
        structure = OWN if family == PICTURES else family if family in (MLA, OWN) else HEADS
        common = {
            "structure": structure,
            "family": family,
            "base": config.get("base_model_type"),
            "number_bytes": BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or "float32"), 2),
            "activation": config.get("hidden_act", config.get("activation_function", "silu")),
            "quantized": bool(config.get("quantization_config")),
            "pictures": "vision_config" in config,
            "tied": bool(config.get("tie_word_embeddings")),
            "has_legacy_rope_keys": config == with_legacy_rope_keys(config),
        }
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        options = [f" with {name}" for name in YARN_OPTIONS if rope.get(name) is not None]
        common["rope"] = f"{rope_type}{''.join(options) if rope_type == 'yarn' else ''}"
        layers = config["num_hidden_layers"]
        if structure == OWN:
            pictures = {"not_served": "vision-language models"} if family == PICTURES else {}
            has_windows = windowed(SimpleNamespace(**config))
            return cls(**_custom_class_facts(config) | pictures, windowed=has_windows, **common)
        if structure == MLA:
            return cls(
                cached_numbers=sum(kv_widths(config)),
                head_sizes=(config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]),
                width=kv_widths(config)[0],
                biases=bool(config.get("attention_bias")),
                frequency_list=rope_type not in ("default", "yarn"),
                yarn=rope_type == "yarn",
                real_experts=config.get("first_k_dense_replace", 0) < layers,
                **common,
            )
        latent = bool(config.get("kv_lora_rank"))  # MLA in another model class
        has_windows = not latent and windowed(SimpleNamespace(**config))
        return cls(cached_numbers=sum(kv_widths(config)), windowed=has_windows, **common)

    @property
    def kind(self) -> str:
        """Name of this kind of checkpoint in the trials."""
        return f"{self._kind}, quantized" if self.quantized else self._kind

    @property
    def _kind(self) -> str:
        if self.structure == MLA:
            rotation = " with a frequency list" * self.frequency_list + " with YaRN" * self.yarn
            return "mla" + " with biases" * self.biases + rotation + " with experts" * self.real_experts
        if self.structure == HEADS:
            return f"{self.family} with a window" if self.windowed else self.family
        return self.structure

    def again(self, flags: str) -> str | None:
        """Return the conversion that an engine may load; None if the source is MLA, has windows or is not PLAIN."""
        stock = self.structure == MLA and not self.real_experts
        plain = self.structure == OWN and self.base in PLAIN and not self.windowed
        return f"convert --to mla {flags}" if stock or plain else None

    def again_for(self, engine: str, with_biases: str | None = None) -> str | None:
        """Return the conversion by ``--engine``; by flag ``with_biases`` for biases, which mostly are the source's."""
        flags = with_biases if self.biases else f"--engine {engine}"
        return flags and self.again(flags)

    def cache(self, number_bytes: int, *, unpacks: bool = False) -> dict[str, int | None]:
        """Return the cache sizes for a verdict, over all layers.

        Args:
            number_bytes: bytes per element.
            unpacks: whether the engine allocates memory for the unpacked tokens of one layer.
        """
        if self.cached_numbers is None:
            return {}
        numbers = self.cached_numbers + self.unpacked_numbers * unpacks
        per_token = numbers * number_bytes + self.packed_bytes
        return {
            "cache_bytes_per_token": per_token,
            "cache_bytes_per_request": self.streamed_numbers * number_bytes or None,
        }


def _with_defaults(text: dict[str, Any]) -> dict[str, Any]:
    """Complete a text config with the defaults of its class: LLaVA's files contain only the differences."""
    if "num_hidden_layers" in text:
        return text
    from transformers import CONFIG_MAPPING

    is_registered = text.get("model_type") in CONFIG_MAPPING
    return {**CONFIG_MAPPING[text["model_type"]]().to_dict(), **text} if is_registered else text


def _custom_class_facts(config: dict[str, Any]) -> dict[str, Any]:
    """Return the cache sizes of a custom model class in our vLLM plugin, or the feature that the plugin lacks."""
    heads = config["num_attention_heads"]
    defaults = {"base_model_type": "llama", "kv_cache": None, "num_key_value_heads": heads}
    defaults |= {"max_position_embeddings": 0, "attention_layers": [None] * config["num_hidden_layers"]}
    try:
        plain = SimpleNamespace(**defaults | config)
        layers = attention_of_layers(plain)
    except NotServed as error:
        return {"cached_numbers": None, "not_served": error.what}
    cached = packed = streamed = 0
    for entry in layers:
        if entry.quantizes:
            packed += row_bytes(entry, plain)
            streamed += entry.first_tokens * entry.format.channels
            continue
        streaming = getattr(entry, "streaming_heads", 0) * 2 * head_dim_of(plain)
        cached += entry.width(plain) - streaming
        streamed += streaming * (entry.sinks + entry.recent) if streaming else 0
    in_bits = all(isinstance(entry, QuantizedLatentEntry) for entry in layers)
    unpacked = max(entry.value_width + entry.rope_dim for entry in layers) if in_bits else 0
    name = " + ".join(name for kind, name in SERVED.items() if kind in {entry.kind for entry in layers})
    served = f"{name.replace('MLA', 'mla')} of {plain.base_model_type}"
    numbers = {"cached_numbers": cached, "unpacked_numbers": unpacked, "streamed_numbers": streamed}
    return {**numbers, "packed_bytes": packed, "served": served}
