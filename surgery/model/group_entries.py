"""How `attention_layers` describes layers that share a cache: one entry each, alike but for the place in the group.

Places count from 0 in each group, so that a slice of a model between groups is described by the same entries.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbours, nothing else.
"""

from typing import Any

CROSS_LAYER_KEYS: dict[str, set[str]] = {
    "cross_layer": {"kind", "group_size", "place", "rank", "block", "sinks", "window"},
    "cross_layer_latent": {
        "kind",
        "group_size",
        "place",
        "rank",
        "block",
        "sinks",
        "window",
        "kv_lora_rank",
        "rope_inv_freq",
        "key_norm_eps",
    },
    "cross_layer_mla": {"kind", "group_size", "place", "rank", "block", "sinks", "window"},
    "cross_layer_prompt": {"kind", "group_size", "place", "key_rank", "value_rank"},
    "cross_layer_pairs": {"kind", "group_size", "place", "block", "sinks", "window", "kept", "interpolation"},
}
"""What the entries of grouped layers in `attention_layers` must say, by their `kind`."""


def check_groups(entries: list[dict[str, Any] | None]) -> None:
    """Raises ValueError unless the cross-layer entries among `entries` make complete groups in one size of block."""
    blocks = set()
    index = 0
    while index < len(entries):
        entry = entries[index]
        if entry is None or entry["kind"] not in CROSS_LAYER_KEYS:
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
