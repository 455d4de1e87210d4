"""Optional modules of the remote code, called parts, and the selection of those that a config needs.

A checkpoint ships the common modules and the parts that its config needs. Only its entry module (`modeling_…`) imports
parts. All other modules get them with `part()` at run time: transformers would follow an import and copy the file into
every checkpoint.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
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
}
"""Module and dataclass of a layer's entry, by its `kind` in `attention_layers`."""

STREAMING_KINDS = {"latent": ("streaming_latent_entry", "StreamingLatentEntry")}
"""Module and dataclass of an entry with `streaming`, for kinds with a separate class for it."""

DECODERS: dict[str, str] = {
    **dict.fromkeys(("gpt_neox", "gpt2", "granitemoehybrid"), "family_decoders"),
    **dict.fromkeys(
        ("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text"), "axis_decoder"
    ),
}
"""Part that adapts a family's decoder, by the `model_type` of the language model."""

QUANTIZED = ("compact_caches", "quantized_cache", "token_codes")


def part(name: str) -> ModuleType:
    """Return a part that the entry module has imported.

    Raises:
        ValueError: the checkpoint ships without this part.
    """
    if (module := loaded(name)) is None:
        raise ValueError(
            f"{name}.py, which config.json requires, is missing from the code next to the weights; "
            "take both from one checkpoint, or import surgery"
        )
    return module


def loaded(name: str) -> ModuleType | None:
    """Return a part; None if no entry module has imported it, as when only the config is loaded."""
    return sys.modules.get(f"{__package__}.{name}")


def entry_of(entry: Mapping[str, Any] | None) -> LayerEntry:
    """Parse an entry of `attention_layers` into its dataclass.

    Raises:
        ValueError: the kind is unknown, or keys are missing or unknown.
    """
    if entry is None:
        return StockEntry()
    if (kind := entry.get("kind")) not in KINDS:
        if str(kind).startswith("cross_layer"):
            raise ValueError(
                f"kind {kind!r} is of an earlier version: load it with trust_remote_code=True where surgery is not "
                "imported, or convert its source again"
            )
        raise ValueError(f"unknown kind {kind!r}; choose from {list(KINDS)}")
    module, name = (entry.get("streaming") and STREAMING_KINDS.get(kind)) or KINDS[kind]
    return getattr(part(module), name).from_entry(entry)


def entries_of(config: Any) -> list[LayerEntry]:
    """Return the entry of every layer, from a `SurgeryConfig` or a family's own config."""
    layers = getattr(config, "attention_layers", None)
    return [entry_of(entry) for entry in layers or [None] * config.num_hidden_layers]


def has_compact_layers(config: Any) -> bool:
    """Return whether a layer keeps heads or latents of some tokens only, or full-precision tokens next to latents."""
    return any(entry.streams or entry.has_window for entry in entries_of(config))


def attention_class(entry: LayerEntry) -> type:
    """Return the attention class of an entry, a subclass of `ConvertedAttention`."""
    module, name = entry.attention
    return getattr(part(module), name)


def parts_of(config: Mapping[str, Any]) -> set[str]:
    """Return the names of the parts that a converted model needs, from its config.json or `vars` of its config."""
    entries = [entry_of(entry) for entry in config["attention_layers"] if entry is not None]
    parts = {entry.attention[0] for entry in entries}
    if any(entry.has_window or entry.streams for entry in entries):
        parts.add("compact_caches")
    if config.get("kv_cache") is not None:
        parts.update(QUANTIZED)
    if (family := config["base_model_type"]) in DECODERS:
        parts.add(DECODERS[family])
    return parts
