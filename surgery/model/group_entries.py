"""How `attention_layers` describes layers that share a cache: one entry each, alike but for the place in the group.

Places count from 0 in each group, so that a slice of a model between groups is described by the same entries.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbours, nothing else.
"""

from typing import Any

from .configuration_surgery import SurgeryConfig
from .parts import shares_cache

_GROUP = {"group_size", "place"}
_SHARED = {*_GROUP, "rank", "block", "sinks", "window"}

CROSS_LAYER_KEYS: dict[str, set[str]] = {
    "cross_layer": _SHARED,
    "cross_layer_latent": {*_SHARED, "kv_lora_rank", "rope_inv_freq", "key_norm_eps"},
    "cross_layer_mla": _SHARED,
    "cross_layer_prompt": {*_GROUP, "key_rank", "value_rank"},
    "cross_layer_pairs": {*_GROUP, "block", "sinks", "window", "kept", "interpolation"},
}
"""What the entries of grouped layers in `attention_layers` must say next to their `kind`."""


def check_sharing(config: SurgeryConfig, index: int) -> None:
    """Check the groups of a whole configuration, once: for the first layer that shares a cache.

    Raises:
        ValueError: groups that are not complete, or next to them what cannot run with a shared cache.
    """
    layers = config.attention_layers
    if any(map(shares_cache, layers[:index])):
        return
    check_groups(layers)
    if config.kv_cache is not None:
        raise ValueError("kv_cache: layers that share a cache cannot quantise it, leave it out")
    if config.streams or config.exact_window:
        raise ValueError(
            "attention_layers: layers that share a cache cannot stand beside streaming ones or exact windows"
        )


def check_groups(entries: list[dict[str, Any] | None]) -> None:
    """Raises ValueError unless the cross-layer entries among `entries` make complete groups in one size of block."""
    blocks = set()
    index = 0
    while index < len(entries):
        entry = entries[index]
        if not shares_cache(entry):
            index += 1
            continue
        size = entry["group_size"]
        group = entries[index : index + size]
        if size < 1 or [_shared(other) for other in group] != [{**_shared(entry), "place": p} for p in range(size)]:
            raise ValueError(
                f"attention_layers[{index}] is not the first of a group of {size} layers with equal entries"
            )
        if entry["kind"] == "cross_layer_pairs" and size != 2:
            raise ValueError(f"attention_layers[{index}]: pairs are groups of 2, not of {size}")
        if any(entry.get(name, 1) < 1 for name in ("rank", "key_rank", "value_rank", "block")):
            raise ValueError(f"attention_layers[{index}]: ranks and block must be at least 1")
        if any(entry.get(name, 0) < 0 for name in ("sinks", "window", "kept")):
            raise ValueError(f"attention_layers[{index}]: sinks, window and kept cannot be negative")
        blocks.add(entry.get("block"))
        index += size
    if len(blocks) > 1:
        raise ValueError(
            f"attention_layers: groups with blocks of {sorted(map(str, blocks))} tokens cannot run together"
        )


def _shared(entry: dict[str, Any] | None) -> dict[str, Any]:
    """What the layers of a group must agree on: all but the frequencies and ranks of their latents."""
    own = {"kv_lora_rank", "rope_inv_freq", "key_norm_eps"}
    return {name: value for name, value in (entry or {}).items() if name not in own}
