"""Facts of a checkpoint that decide whether an engine loads it, read from its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from surgery.checkpoint.config_file import with_rope_beside
from surgery.checkpoint.kv_widths import DECILM, kv_widths
from surgery.common.size_names import with_size_names
from surgery.model.layer_entry import head_dim_of
from surgery.model.quantized_latent_entry import QuantizedLatentEntry
from surgery_vllm.row_layout import row_bytes
from surgery_vllm.structure import SERVED, NotServed, attention_of_layers, windowed

MLA, HEADS, OWN = "deepseek_v3", "heads", "surgery"
PICTURES = "surgery_pictures"
"""The custom model class inside of a vision-language model."""
OWN_CLASSES = OWN, PICTURES

PLAIN = ("llama", "mistral")
"""Families whose attention is queries, keys, values and RoPE, which every engine's MLA carries."""
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Facts:
    """A checkpoint as engines see it.

    Attributes:
        structure: MLA (stock ``deepseek_v3``), HEADS (a family's own class), DECILM, or OWN, this package's class.
        family: model_type of the config; ``base``: of the own class, its source's.
        cached_numbers: per token, all layers, at an infinite window; None for structures of the own class that no
            engine but transformers runs.
        packed_bytes: per token beside them, all layers, in any dtype: rows of MLA and low rank in bits.
        unpacked_numbers: per token beside them, of one layer: what kernels unpack of MLA in bits on CUDA.
        streamed_numbers: per request beside them: what streaming heads see of one that is longer, and first tokens in
            full precision.
        number_bytes: of a weight.
        head_sizes: of MLA, (nope, rope, value) numbers of a head.
        width: of MLA, numbers that a layer caches per token, rank and rope.
        biases: of MLA, on the attention's projections.
        frequency_list: of MLA, rotation by frequencies that are no grid of default RoPE, and none of YaRN.
        yarn: of MLA, rotation by YaRN: DeepSeek's own models, and what was made of them.
        real_experts: of MLA, some layers are mixtures of experts: such models again.
        tied: the embeddings are the output head too.
        rope_beside: how it rotates is said beside ``rope_parameters`` too, in the keys of transformers 4.
        windowed: some layers have an attention window.
        quantized: the weights are stored quantized, which took no part in any trial.
        pictures: a vision-language model, whose language model has the cache.
        served: of the own class, the name under which trials of our plugin for vLLM are kept.
        not_served: of the own class, what that plugin has no code for; None if it has.
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
    real_experts: bool = False
    tied: bool = False
    rope_beside: bool = False
    windowed: bool = False
    quantized: bool = False
    pictures: bool = False
    served: str | None = None
    not_served: str | None = None

    @classmethod
    def of(cls, config: dict[str, Any]) -> Facts:
        """Reads a config.json."""
        config = with_size_names(config)
        family = config.get("model_type", "")
        if isinstance(config.get("text_config"), dict):
            config = {**config, **_with_defaults(config["text_config"])}
        structure = OWN if family == PICTURES else family if family in (MLA, DECILM, OWN) else HEADS
        common = {
            "structure": structure,
            "family": family,
            "base": config.get("base_model_type"),
            "number_bytes": BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or "float32"), 2),
            "activation": config.get("hidden_act", config.get("activation_function", "silu")),
            "quantized": bool(config.get("quantization_config")),
            "pictures": "vision_config" in config,
            "tied": bool(config.get("tie_word_embeddings")),
            "rope_beside": config == with_rope_beside(config),
        }
        layers = config["num_hidden_layers"]
        if family == PICTURES:
            return cls(**_own(config) | {"not_served": "vision-language models"}, **common)
        if structure == OWN:
            return cls(**_own(config), **common)
        if structure == MLA:
            rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
            kind = rope.get("rope_type", rope.get("type", "default"))
            return cls(
                cached_numbers=sum(kv_widths(config)),
                head_sizes=(config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]),
                width=kv_widths(config)[0],
                biases=bool(config.get("attention_bias")),
                frequency_list=kind not in ("default", "yarn"),
                yarn=kind == "yarn",
                real_experts=config.get("first_k_dense_replace", 0) < layers,
                **common,
            )
        latent = bool(config.get("kv_lora_rank"))  # MLA in a class of its own
        has_windows = not latent and windowed(SimpleNamespace(**config))
        return cls(cached_numbers=sum(kv_widths(config)), windowed=has_windows, **common)

    @property
    def kind(self) -> str:
        """The name under which trials of such checkpoints are kept."""
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
        """The conversion of its source that an engine may take; None of a source that is MLA itself, or whose attention
        has more than Llama's."""
        stock = self.structure == MLA and not self.real_experts
        return f"convert --to mla {flags}" if stock or (self.structure == OWN and self.base in PLAIN) else None

    def again_for(self, engine: str, with_biases: str | None = None) -> str | None:
        """Return how to convert again by ``--engine``, or, for one with biases, which are mostly the source's, by
        another flag where there is one that helps."""
        flags = with_biases if self.biases else f"--engine {engine}"
        return flags and self.again(flags)

    def cache(self, number_bytes: int, *, unpacks: bool = False) -> dict[str, int | None]:
        """Return the facts of a verdict on the cache of all layers at so many bytes an element.

        Args:
            number_bytes: of an element.
            unpacks: whether kernels have memory in it for one layer's unpacked tokens.
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
    """The whole configuration of a language model: LLaVA's files say what differs from its class alone."""
    if "num_hidden_layers" in text:
        return text
    from transformers import CONFIG_MAPPING

    is_registered = text.get("model_type") in CONFIG_MAPPING
    return {**CONFIG_MAPPING[text["model_type"]]().to_dict(), **text} if is_registered else text


def _own(config: dict[str, Any]) -> dict[str, Any]:
    """Return the plugin's verdict for vLLM on a checkpoint of the custom model class."""
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
    unpacked = max(entry.format.channels for entry in layers) if in_bits else 0
    name = " + ".join(name for kind, name in SERVED.items() if kind in {entry.kind for entry in layers})
    served = f"{name.replace('MLA', 'mla')} of {plain.base_model_type}"
    numbers = {"cached_numbers": cached, "unpacked_numbers": unpacked, "streamed_numbers": streamed}
    return {**numbers, "packed_bytes": packed, "served": served}
