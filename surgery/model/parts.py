"""The modules that only some checkpoints need, and which of them a configuration needs.

A checkpoint carries what all have in common and the parts of its own configuration. Its entry module (`modeling_…`)
imports these; everything else asks for a part by `part` when it needs it, and so does not name it in an import, which
transformers would follow.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbours, nothing else.
"""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

KINDS: dict[str, tuple[str, str]] = {
    "latent": ("latent_attention", "LatentAttention"),
    "low_rank": ("low_rank_attention", "LowRankAttention"),
    "grouped": ("grouped_attention", "GroupedAttention"),
    "hybrid": ("hybrid_attention", "HybridAttention"),
    "cross_layer": ("cross_layer_attention", "CrossLayerAttention"),
    "cross_layer_latent": ("cross_layer_latent_attention", "CrossLayerLatentAttention"),
    "cross_layer_mla": ("cross_layer_latent_attention", "CrossLayerFamilyLatents"),
    "cross_layer_prompt": ("cross_layer_attention", "PromptBasisAttention"),
    "cross_layer_pairs": ("cross_layer_attention", "MergedPairAttention"),
}
"""The part and the class of an attention, by the `kind` of a layer's entry in `attention_layers`."""

STREAMING_KINDS = {"latent": ("streaming_latent_attention", "StreamingLatentAttention")}
"""The same where the entry says `streaming`, of kinds that have a class of their own for it."""

DECODERS: dict[str, str] = {
    **dict.fromkeys(("gpt_neox", "gpt2", "granitemoehybrid"), "family_decoders"),
    **dict.fromkeys(
        ("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text"), "axis_decoder"
    ),
}
"""The part that has a decoder for a family, by the `model_type` of its language model."""

QUANTIZED = ("compact_caches", "quantized_cache", "token_codes", "straight_through")

Entry = dict[str, Any]
"""The description of one layer's attention in `attention_layers`."""


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


def attention_part(entry: Entry) -> str:
    """Return the name of the part that has an entry's attention."""
    return _names(entry)[0]


def attention_class(entry: Entry) -> type:
    """Return the class of an entry's attention, a `ConvertedAttention`."""
    module, name = _names(entry)
    return getattr(part(module), name)


def shares_cache(entry: Entry | None) -> bool:
    """Whether a layer shares its cache with others."""
    return bool(entry) and entry["kind"].startswith("cross_layer")


def has_window(entry: Entry | None) -> bool:
    """Whether the cache of a layer keeps full-precision tokens next to latents."""
    return bool(entry) and entry["kind"] == "low_rank" and bool(entry["window"])


def is_streaming(entry: Entry | None) -> bool:
    """Whether the cache of a layer keeps some heads or latents for sinks and a window only."""
    return bool(entry) and (entry["kind"] == "hybrid" or bool(entry.get("streaming")))


def parts_of(config: Mapping[str, Any]) -> set[str]:
    """Return the parts that a converted model needs.

    Args:
        config: the attributes of a `SurgeryConfig`, or its config.json.
    """
    entries = [entry for entry in config["attention_layers"] if entry]
    parts = {attention_part(entry) for entry in entries}
    if any(map(shares_cache, entries)):
        parts.add("blockwise_decoder")
    if any(has_window(entry) or is_streaming(entry) for entry in entries):
        parts.add("compact_caches")
    cache = config.get("kv_cache")
    if cache is not None:
        parts.update(QUANTIZED)
    if (family := config["base_model_type"]) in DECODERS:
        parts.add(DECODERS[family])
    return parts


def _names(entry: Entry) -> tuple[str, str]:
    kind = entry["kind"]
    return (entry.get("streaming") and STREAMING_KINDS.get(kind)) or KINDS[kind]
