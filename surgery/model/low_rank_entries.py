"""The entry of a low-rank layer in `attention_layers`, and what may be wrong with it.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbours, nothing else.
"""

from typing import Any

from .configuration_surgery import SurgeryConfig, codes_problem
from .sink_window_cache import window_problem

REQUIRED = {"blocks", "shared_layers", "shared_rank", "sinks", "window"}
OPTIONS = {"streaming", "codes"}

_HEADS = ("keys", "values")
_STREAMING_KEYS = {"blocks", "sinks", "recent"}


def entry_problem(config: SurgeryConfig, index: int, entry: dict[str, Any]) -> str | None:
    """Return what is wrong with the entry of layer `index`; None if nothing is."""
    if entry.get("streaming") and (problem := _streaming_problem(entry)):
        return problem
    if problem := codes_problem(entry, sum(block["rank"] for block in entry["blocks"])):
        return problem
    return _blocks_problem(config, entry) or _sharing_problem(config, index, entry)


def _blocks_problem(config: SurgeryConfig, entry: dict[str, Any]) -> str | None:
    blocks, heads = entry["blocks"], list(range(config.num_key_value_heads))
    if any(block["rank"] < 1 for block in blocks):
        return "a block's rank must be at least 1"
    for name in _HEADS:
        if sorted(head for block in blocks for head in block[name]) != heads:
            return f"the blocks' {name} are not the {len(heads)} KV heads, each once"
    if entry["sinks"] and not entry["window"]:
        return "sinks need a window of at least 1"
    return None


def _sharing_problem(config: SurgeryConfig, index: int, entry: dict[str, Any]) -> str | None:
    """Return what is wrong with the layers whose latents this one reads."""
    first = index - entry["shared_layers"]
    if first < 0 or (entry["shared_layers"] and len(entry["blocks"]) > 1):
        return "shared_layers needs that many layers before it, and one block"
    earlier = config.attention_layers[first:index]
    if any(other is None or other["kind"] != "low_rank" for other in earlier):
        return "shared_layers counts low_rank layers only"
    if any(other.get("streaming") for other in earlier):
        return "shared_layers counts layers that keep the latents of all tokens only"
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and len(set(kinds[first : index + 1])) > 1:
        return "latents are shared between layers of one window only"
    shared = sum(block["rank"] for other in earlier for block in other["blocks"])
    if shared != entry["shared_rank"]:
        return f"shared_rank is {entry['shared_rank']}, the layers before have {shared}"
    return None


def _streaming_problem(entry: dict[str, Any]) -> str | None:
    streaming, blocks = entry["streaming"], entry["blocks"]
    if streaming.keys() != _STREAMING_KEYS:
        return f"streaming has keys {sorted(streaming)}, not {sorted(_STREAMING_KEYS)}"
    numbers = streaming["blocks"]
    if not numbers or sorted(set(numbers)) != sorted(numbers) or not set(numbers) <= set(range(len(blocks))):
        return f"streaming blocks {numbers} are not some of the {len(blocks)} blocks, each once"
    keys, values = (sorted(head for number in numbers for head in blocks[number][name]) for name in _HEADS)
    if keys != values:
        return f"streaming blocks hold the keys of heads {keys} and the values of heads {values}, not of the same"
    if entry["window"] or entry["shared_layers"]:
        return "latents that stream have no exact window and no shared_layers"
    return window_problem(streaming)
