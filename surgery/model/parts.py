"""The modules that only some checkpoints need, and which of them a configuration needs.

A checkpoint carries what all have in common and the parts of its own configuration. Its entry module (`modeling_…`)
imports these; everything else asks for a part by `part` when it needs it, and so does not name it in an import, which
transformers would follow.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from .layer_entry import LayerEntry, StockEntry

KINDS: dict[str, tuple[str, str]] = {
    "latent": ("latent_entry", "LatentEntry"),
    "quantized_latent": ("quantized_latent_entry", "QuantizedLatentEntry"),
    "low_rank": ("low_rank_entry", "LowRankEntry"),
    "quantized_low_rank": ("quantized_low_rank_entry", "QuantizedLowRankEntry"),
    "grouped": ("grouped_entry", "GroupedEntry"),
    "hybrid": ("hybrid_entry", "HybridEntry"),
    "cross_layer": ("cross_layer_entry", "CrossLayerEntry"),
    "cross_layer_latent": ("cross_layer_entry", "SharedLatentEntry"),
    "cross_layer_mla": ("cross_layer_entry", "SharedMLAEntry"),
    "cross_layer_prompt": ("cross_layer_entry", "PromptBasisEntry"),
    "cross_layer_pairs": ("cross_layer_entry", "MergedPairEntry"),
}
"""The module and the dataclass of a layer's entry, by the `kind` in `attention_layers`."""

STREAMING_KINDS = {"latent": ("streaming_latent_entry", "StreamingLatentEntry")}
"""The same where the entry says `streaming`, of kinds that have one of their own for it."""

DECODERS: dict[str, str] = {
    **dict.fromkeys(("gpt_neox", "gpt2", "granitemoehybrid"), "family_decoders"),
    **dict.fromkeys(
        ("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text"), "axis_decoder"
    ),
}
"""The part that has a decoder for a family, by the `model_type` of its language model."""

QUANTIZED = ("compact_caches", "quantized_cache", "token_codes")


def part(name: str) -> ModuleType:
    """Return a module that the entry module has imported.

    Raises:
        ValueError: the checkpoint does not carry it.
    """
    if (module := loaded(name)) is None:
        raise ValueError(
            f"the code next to the weights has no {name}.py, which config.json asks for: "
            "take both from one checkpoint, or import surgery"
        )
    return module


def loaded(name: str) -> ModuleType | None:
    """Return a part; None if no entry module has imported it, as where a configuration is read alone."""
    return sys.modules.get(f"{__package__}.{name}")


def entry_of(entry: Mapping[str, Any] | None) -> LayerEntry:
    """Return what an entry of `attention_layers` says.

    Raises:
        ValueError: the kind is unknown, or keys are missing or unknown.
    """
    if entry is None:
        return StockEntry()
    if (kind := entry.get("kind")) not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {list(KINDS)}")
    module, name = (entry.get("streaming") and STREAMING_KINDS.get(kind)) or KINDS[kind]
    return getattr(part(module), name).from_entry(entry)


def entries_of(config: Any) -> list[LayerEntry]:
    """Return every layer's entry of a `SurgeryConfig`, or of the config of a family."""
    layers = getattr(config, "attention_layers", None)
    return [entry_of(entry) for entry in layers or [None] * config.num_hidden_layers]


def has_compact_layers(config: Any) -> bool:
    """Return whether a layer keeps heads or latents of some tokens only, or full-precision tokens next to latents."""
    return any(entry.streams or entry.has_window for entry in entries_of(config))


def attention_class(entry: LayerEntry) -> type:
    """Return the class of an entry's attention, a `ConvertedAttention`."""
    module, name = entry.attention
    return getattr(part(module), name)


def parts_of(config: Mapping[str, Any]) -> set[str]:
    """Return the parts that a converted model needs, given the attributes of a `SurgeryConfig` or its config.json."""
    entries = [entry_of(entry) for entry in config["attention_layers"] if entry is not None]
    parts = {entry.attention[0] for entry in entries}
    if any(entry.shares_cache for entry in entries):
        parts.add("blockwise_decoder")
    if any(entry.has_window or entry.streams for entry in entries):
        parts.add("compact_caches")
    if config.get("kv_cache") is not None:
        parts.update(QUANTIZED)
    if (family := config["base_model_type"]) in DECODERS:
        parts.add(DECODERS[family])
    return parts
