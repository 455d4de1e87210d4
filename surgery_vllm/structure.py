"""Which attention every layer has, of the structures that vLLM serves here; the others are refused by name."""

from dataclasses import dataclass
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Kinds of `attention_layers` that cache latents, and what of theirs an entry may have that is not served.
NAMES = {"latent": "MLA", "low_rank": "low rank"}
LOW_RANK_FEATURES = (("shared_layers", "latents of earlier layers"), ("window", "a window of exact tokens"))


class NotServed(ValueError):
    """A structure that this plugin has no code for.

    Attributes:
        what: its name.
    """

    def __init__(self, what: str):
        super().__init__(f"model-surgery's plugin for vLLM does not serve {what}; transformers runs this checkpoint")
        self.what = what


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention of one layer.

    Attributes:
        rank: r, numbers of the cached latent.
        inv_freq: inverse frequencies of the ρ/2 rotated pairs of the shared key, radians per position.
        key_norm_eps: of a source that normalises keys: the inverse root mean square of each of its `gains` KV heads is
            cached with the latent. None: it does not.
        gains: G, those numbers of a token.
    """

    rank: int
    inv_freq: tuple[float, ...]
    key_norm_eps: float | None = None
    gains: int = 0

    @property
    def rope_dim(self) -> int:
        return 2 * len(self.inv_freq)

    @property
    def width(self) -> int:
        """Numbers that the cache holds of a token."""
        return self.rank + self.rope_dim + self.gains


@dataclass(frozen=True)
class Grouped:
    """The family's own attention with so many KV heads."""

    kv_heads: int


@dataclass(frozen=True)
class SplitHeads:
    """The family's own attention whose last KV heads see the first tokens and the last ones only.

    Attributes:
        full_heads: KV heads that see all tokens.
        streaming_heads: the others.
        sinks: first tokens that those see.
        recent: last tokens that those see, a query's own among them.
    """

    full_heads: int
    streaming_heads: int
    sinks: int
    recent: int


@dataclass(frozen=True)
class Block:
    """A latent of `rank` numbers and the KV heads whose keys and whose values are rebuilt from it."""

    rank: int
    keys: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class LowRank:
    """Keys and values of all KV heads, rebuilt from the latents of one layer."""

    blocks: tuple[Block, ...]

    @property
    def width(self) -> int:
        """Numbers that the cache holds of a token."""
        return sum(block.rank for block in self.blocks)


Layer = Latent | Grouped | SplitHeads | LowRank


def attention_of_layers(config: Any) -> list[Layer]:
    """The attention of every layer of a :class:`~surgery_vllm.config.SurgeryConfig`.

    Raises:
        NotServed: what vLLM would compute otherwise, or not at all.
    """
    if config.base_model_type not in FAMILIES:
        raise NotServed(f"the family {config.base_model_type}")
    activation = getattr(config, "hidden_act", "silu")
    if activation != "silu":
        raise NotServed(f"the activation {activation}")
    if config.kv_cache is not None:
        raise NotServed("a cache quantised by kv_cache")
    if windowed(config):
        raise NotServed("attention windows")
    split = any(entry and entry["kind"] == "hybrid" for entry in config.attention_layers)
    layers = [_attention(config, layer, entry, split) for layer, entry in enumerate(config.attention_layers)]
    if split:
        _check_split(layers)
    return layers


def _check_split(layers: list[Layer]) -> None:
    """The streaming heads of all layers are one group of vLLM's cache, which holds keys and values."""
    if any(isinstance(layer, Latent | LowRank) for layer in layers):
        raise NotServed("hybrid heads beside latents")
    if len({(layer.sinks, layer.recent) for layer in layers if layer.streaming_heads}) > 1:
        raise NotServed("hybrid heads of several windows")


def _attention(config: Any, layer: int, entry: dict[str, Any] | None, split: bool) -> Layer:
    kind = "grouped" if entry is None else entry["kind"]
    if kind == "hybrid":
        if entry["compensated_heads"]:
            raise NotServed(f"compensated heads (layer {layer})")
        full = entry["full_heads"]
        return SplitHeads(full, entry["kv_heads"] - full, entry["sinks"], entry["recent"])
    if kind == "grouped" and split:
        return SplitHeads(config.num_key_value_heads if entry is None else entry["kv_heads"], 0, 0, 0)
    if kind == "grouped":
        if config.base_model_type == "qwen3":
            raise NotServed(f"grouped heads with q/k-norm (layer {layer})")
        return Grouped(config.num_key_value_heads if entry is None else entry["kv_heads"])
    if kind not in NAMES:
        raise NotServed(f"attention of kind {kind!r} (layer {layer})")
    for name, feature in (("streaming", "streaming"), ("codes", "codes"), *LOW_RANK_FEATURES):
        if entry.get(name):
            raise NotServed(f"{NAMES[kind]} with {feature} (layer {layer})")
    if kind == "low_rank":
        blocks = (Block(block["rank"], tuple(block["keys"]), tuple(block["values"])) for block in entry["blocks"])
        return LowRank(tuple(blocks))
    eps = entry["key_norm_eps"]
    gains = 0 if eps is None else config.num_key_value_heads
    return Latent(entry["kv_lora_rank"], tuple(entry["rope_inv_freq"]), eps, gains)


def windowed(config: Any) -> bool:
    """Whether some layers of a family's model see a window only, shorter than the model's context."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", None) is False:
        return False
    if window >= (getattr(config, "max_position_embeddings", None) or 0):
        return False
    return "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
