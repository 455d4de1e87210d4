"""Layer entries of the structures that the plugin serves, and the refusal of all others."""

from typing import Any

from surgery.model.grouped_entry import GroupedEntry
from surgery.model.hybrid_entry import HybridEntry
from surgery.model.latent_entry import LatentEntry
from surgery.model.layer_entry import LayerEntry, kv_heads_of
from surgery.model.low_rank_entry import LowRankEntry
from surgery.model.parts import entry_of
from surgery.model.quantized_latent_entry import QuantizedLatentEntry
from surgery.model.quantized_low_rank_entry import QuantizedLowRankEntry

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SERVED = {
    LatentEntry.kind: "MLA",
    QuantizedLatentEntry.kind: "MLA in bits",
    LowRankEntry.kind: "low rank",
    QuantizedLowRankEntry.kind: "low rank in bits",
    GroupedEntry.kind: "KV heads by layer",
    HybridEntry.kind: "hybrid heads",
}
"""Served kinds of attention and their display names."""
NOT_SERVED = {
    "streaming": "streaming",
    "codes": "codes",
    "window": "a residual window",
}
"""Entry fields that must be empty, and their display names."""


class NotServed(ValueError):
    """Raised for a structure that this plugin does not implement.

    Attributes:
        what: name of the structure.
    """

    def __init__(self, what: str):
        super().__init__(f"model-surgery's plugin for vLLM does not support {what}; use transformers for it")
        self.what = what


def attention_of_layers(config: Any) -> list[LayerEntry]:
    """Return the entry of every layer of a :class:`~surgery_vllm.config.SurgeryConfig`, each of a kind in ``SERVED``.

    Stock attention becomes "grouped", or "hybrid" without streaming heads in a model with hybrid layers.

    Raises:
        NotServed: the plugin cannot run the model, or would compute something else.
    """
    if config.base_model_type not in FAMILIES:
        raise NotServed(f"model family {config.base_model_type}")
    activation = getattr(config, "hidden_act", "silu")
    if activation != "silu":
        raise NotServed(f"activation {activation}")
    if config.kv_cache is not None:
        raise NotServed("a KV cache quantized by kv_cache")
    if windowed(config):
        raise NotServed("sliding windows")
    for layer, entry in enumerate(config.attention_layers):
        if entry is not None and entry.get("kind") not in SERVED:
            raise NotServed(f"attention of kind {entry.get('kind')!r} (layer {layer})")
    try:
        entries = [entry_of(entry) for entry in config.attention_layers]
    except ValueError as error:
        raise NotServed(f"attention_layers of this config.json: {error}") from None
    layers = [GroupedEntry(kv_heads=kv_heads_of(config)) if entry.kind is None else entry for entry in entries]
    for layer, entry in enumerate(layers):
        for name, feature in NOT_SERVED.items():
            if getattr(entry, name, None):
                raise NotServed(f"{SERVED[entry.kind]} with {feature} (layer {layer})")
    in_bits = [entry for entry in layers if entry.quantizes]
    if in_bits and len(in_bits) < len(layers):  # all layers share the blocks of one KV cache group
        raise NotServed(f"{SERVED[in_bits[0].kind]} next to layers of other kinds")
    if any(entry.kind == "hybrid" for entry in layers):
        return _with_streaming_heads(layers)
    for layer, entry in enumerate(layers):
        if config.base_model_type == "qwen3" and entry.kind == "grouped":
            raise NotServed(f"grouped heads with q/k-norm (layer {layer})")
    return layers


def _with_streaming_heads(layers: list[LayerEntry]) -> list[LayerEntry]:
    """Convert all entries to hybrid ones; the streaming heads of all layers form one KV cache group of one window."""
    if any(isinstance(layer, LatentEntry | LowRankEntry) for layer in layers):
        raise NotServed("hybrid heads next to latents")
    split = [layer if isinstance(layer, HybridEntry) else _whole(layer.kv_heads) for layer in layers]
    if len({(layer.sinks, layer.recent) for layer in split if layer.streaming_heads}) > 1:
        raise NotServed("hybrid heads with several windows")
    return split


def _whole(kv_heads: int) -> HybridEntry:
    order = tuple(range(kv_heads))
    return HybridEntry(kv_heads=kv_heads, full_heads=kv_heads, sinks=0, recent=0, head_order=order)


def windowed(config: Any) -> bool:
    """Return whether a family's model has layers with a sliding window shorter than its context."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", None) is False:
        return False
    if window >= (getattr(config, "max_position_embeddings", None) or 0):
        return False
    return "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
