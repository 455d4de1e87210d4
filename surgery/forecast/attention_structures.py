"""The structures that `kernels/planner.py` predicts times for, of sources, of what they can become, and of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from surgery.checkpoint.config_file import arguments
from surgery.families import FAMILIES, LATENT_FAMILIES, Family, head_shape, key_gains
from surgery.families.base import keeps_state
from surgery.kernels.planner import Attention, Block, Grouped, Latent, LowRank, quantised
from surgery.model import SurgeryConfig
from surgery.running.skeleton import skeleton

Windows = list[int | None]


def of_family(config: Any, windows: Windows, number_bytes: float) -> list[Attention]:
    """Of a family's own attention, layer by layer.

    Args:
        config: of transformers, as loaded.
        windows: of every layer with keys and values, tokens; None: all.
        number_bytes: of a cached number.
    """
    heads, kv_heads, head_dim = head_shape(config)
    return [
        Grouped(heads, kv_heads, head_dim, head_dim, window, key_bytes=number_bytes, value_bytes=number_bytes)
        for window in windows
    ]


def of_config(config: dict[str, Any], number_bytes: float) -> list[Attention]:
    """Of a config.json: a family's, MLA's of any, or the own class's."""
    fields = arguments(config)
    if config["model_type"] == "surgery":
        return of_own_class(SurgeryConfig(**fields), number_bytes)
    family = FAMILIES.get(config["model_type"])
    loaded = CONFIG_MAPPING[config["model_type"]](**fields)
    if config["model_type"] in LATENT_FAMILIES:
        return of_stock_mla({**loaded.to_dict(), **config}, number_bytes)
    return of_family(loaded, windows_of(family, loaded), number_bytes)


def cache_bytes_of(
    config: dict[str, Any], dtype: torch.dtype, layers: Sequence[Attention] | None = None
) -> Callable[[int, int], int]:
    """Bytes of the live cache that a model of a config.json keeps of so many sequences of so many tokens each.

    Args:
        dtype: of cached numbers.
        layers: of the model, if they are known.
    """
    if config["model_type"] == "surgery":
        return skeleton(config, dtype).kv_cache_bytes
    layers = of_config(config, dtype.itemsize) if layers is None else layers
    return lambda rows, tokens: round(rows * tokens * sum(layer.token_bytes(tokens) for layer in layers))


def windows_of(family: Family | None, config: Any) -> Windows:
    """Of every layer with keys and values, tokens; None: all."""
    layers = [layer for layer in range(config.num_hidden_layers) if not keeps_state(config, layer)]
    return [family.window(config, layer) if family else None for layer in layers]


def of_stock_mla(config: dict[str, Any], number_bytes: float) -> list[Attention]:
    """Of a config.json of MLA, `deepseek_v3` or another."""
    return _mla_layers(config, number_bytes, number_bytes)


def _mla_layers(config: dict[str, Any], latent_bytes: float, rope_bytes: float) -> list[Attention]:
    layer = Latent(
        config["num_attention_heads"],
        config["kv_lora_rank"],
        config["qk_rope_head_dim"],
        config["qk_nope_head_dim"],
        config["v_head_dim"],
        latent_bytes=latent_bytes,
        rope_bytes=rope_bytes,
    )
    return [layer] * config["num_hidden_layers"]


def of_own_class(config: Any, number_bytes: float) -> list[Attention]:
    """Of a `SurgeryConfig`: any mixture of kinds, quantised or not."""
    if config.base_model_type in LATENT_FAMILIES:
        layers = _mla_layers(config.to_dict(), *_cached_bytes(config.kv_cache, {"kind": "latent"}, number_bytes))
        # Latents that layers share are read at their own width.
        entries = config.attention_layers or [None] * len(layers)
        ranks = [(entry or {}).get("rank", config.kv_lora_rank) for entry in entries]
        return [replace(layer, rank=rank) for layer, rank in zip(layers, ranks, strict=True)]
    family = FAMILIES[config.base_model_type]
    stock = of_family(config, windows_of(family, config), number_bytes)
    gains = key_gains(config.base_model_type, config.num_key_value_heads)
    entries = config.attention_layers or [None] * config.num_hidden_layers
    places = [layer for layer in range(config.num_hidden_layers) if not keeps_state(config, layer)]
    found = []
    for place, layer in zip(places, stock, strict=True):
        entry = entries[place] or {}
        found.append(_of_entry(entry, layer, gains, *_cached_bytes(config.kv_cache_of(place), entry, number_bytes)))
    return found


def _of_entry(entry: dict[str, Any], stock: Grouped, gains: int, key_bytes: float, value_bytes: float) -> Attention:
    """One layer; `stock` is the attention that it stands in the place of."""
    heads, kv_heads, head_dim, window = stock.heads, stock.kv_heads, stock.key_dim, stock.window
    kind = entry.get("kind")
    if kind in (None, "grouped"):
        kv_heads = entry.get("kv_heads", kv_heads)
        return Grouped(heads, kv_heads, head_dim, head_dim, window, key_bytes=key_bytes, value_bytes=value_bytes)
    if kind == "hybrid":
        streaming = entry["kv_heads"] - entry["full_heads"]
        kept = entry["sinks"] + entry["recent"]
        return Grouped(heads, entry["kv_heads"], head_dim, head_dim, window, streaming, kept, key_bytes, value_bytes)
    if kind in ("latent", "cross_layer_latent"):
        streaming = entry.get("streaming") or {}
        seen = streaming["sinks"] + streaming["recent"] if streaming else window
        extra = 0.0 if entry["key_norm_eps"] is None else gains * stock.key_bytes
        # Latents that layers share are read at their own width: the basis can be absorbed as the up-projections are.
        rank, rope = entry.get("rank", entry["kv_lora_rank"]), 2 * len(entry["rope_inv_freq"])
        # Latents stand in the place of keys in the cache, rotated keys in that of values.
        return Latent(heads, rank, rope, head_dim, head_dim, seen, extra, key_bytes, value_bytes)
    if kind == "low_rank":
        shared, streaming = entry["shared_rank"], entry.get("streaming") or {"blocks": []}
        blocks = tuple(
            Block(
                shared + block["rank"],
                len(block["keys"]),
                len(block["values"]),
                streaming["sinks"] + streaming["recent"] if number in streaming["blocks"] else None,
            )
            for number, block in enumerate(entry["blocks"])
        )
        exact = entry["sinks"] + entry["window"]
        return LowRank(heads, kv_heads, head_dim, blocks, exact, key_bytes, window)
    return _cross_layer(entry, stock, window)


def _cross_layer(entry: dict[str, Any], stock: Grouped, window: int | None) -> Attention:
    """A layer that reads what a group shares: the group's whole store, at every layer."""
    heads, kv_heads, head_dim = stock.heads, stock.kv_heads, stock.key_dim
    if entry["kind"] == "cross_layer_pairs":
        return stock  # merged directions have the width of keys and values, and both layers read them
    if entry["kind"] == "cross_layer_prompt":
        blocks = (Block(entry["key_rank"], kv_heads, 0), Block(entry["value_rank"], 0, kv_heads))
    else:
        blocks = (Block(entry["rank"], kv_heads, kv_heads),)
    exact = (entry.get("block") or 0) + entry.get("sinks", 0) + entry.get("window", 0)
    return LowRank(heads, kv_heads, head_dim, blocks, exact, stock.key_bytes, window)


def _cached_bytes(kv_cache: dict[str, Any] | None, entry: dict[str, Any], number_bytes: float) -> tuple[float, float]:
    """Bytes of a cached number of keys or latents, on average, and of values or rotated keys."""
    if kv_cache is None:
        return number_bytes, number_bytes

    def of(format: str) -> float:
        if format == "exact":
            return number_bytes
        bits = 8 if format == "fp8" else int(format.removeprefix("int"))
        return quantised(bits, kv_cache["group"], scale_bytes=number_bytes, zeros=format != "fp8")

    spans = entry.get("codes") or [(kv_cache["format"], 1)]
    keys = sum(of(format) * count for format, count in spans) / sum(count for _, count in spans)
    rope = kv_cache.get("rope_format") if entry.get("kind") == "latent" else None
    return keys, of(rope or kv_cache["format"])
