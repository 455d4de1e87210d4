"""Which attention every layer has, of the structures that vLLM serves here; the others are refused by name."""

from dataclasses import dataclass
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention of one layer.

    Attributes:
        rank: r, numbers of the cached latent.
        inv_freq: inverse frequencies of the ρ/2 rotated pairs of the shared key, radians per position.
    """

    rank: int
    inv_freq: tuple[float, ...]

    @property
    def rope_dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class Grouped:
    """The family's own attention with so many KV heads."""

    kv_heads: int


def attention_of_layers(config: Any) -> list[Latent | Grouped]:
    """The attention of every layer of a :class:`~surgery_vllm.config.SurgeryConfig`.

    Raises:
        ValueError: what vLLM would compute otherwise, or not at all.
    """
    if config.base_model_type not in FAMILIES:
        _refuse(f"the family {config.base_model_type}; it serves {', '.join(FAMILIES)}")
    if config.kv_cache is not None:
        _refuse("a cache quantised by kv_cache")
    if _windowed(config):
        _refuse("attention windows")
    return [_attention(config, layer, entry) for layer, entry in enumerate(config.attention_layers)]


def _attention(config: Any, layer: int, entry: dict[str, Any] | None) -> Latent | Grouped:
    kind = "grouped" if entry is None else entry["kind"]
    if kind == "grouped":
        return Grouped(config.num_key_value_heads if entry is None else entry["kv_heads"])
    if kind != "latent":
        _refuse(f"attention of kind {kind!r} (layer {layer})")
    if entry["key_norm_eps"] is not None:
        _refuse(f"MLA with q/k-norm (layer {layer})")
    for name in ("streaming", "codes"):
        if entry.get(name):
            _refuse(f"MLA with {name} (layer {layer})")
    return Latent(entry["kv_lora_rank"], tuple(entry["rope_inv_freq"]))


def _windowed(config: Any) -> bool:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or window >= config.max_position_embeddings:
        return False
    return kinds is None or "sliding_attention" in kinds


def _refuse(what: str) -> None:
    raise ValueError(f"model-surgery's plugin does not serve {what}; transformers runs this checkpoint")
