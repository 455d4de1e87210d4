"""Inspection of converted checkpoints: the custom model class, and MLA."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from surgery import model as own_model
from surgery.architectures.custom_class import MODEL_TYPE, layer_entries, own_config
from surgery.checkpoint.config_file import arguments
from surgery.checkpoint.reader import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.common.human import per_token
from surgery.engines.number_formats import ruinous_formats
from surgery.families import FAMILIES, LATENT_FAMILIES, head_shape
from surgery.families.base import keeps_state
from surgery.inspection.architecture import model_facts
from surgery.model.latent_entry import LatentEntry
from surgery.model.layer_entry import LayerEntry, caches_latents
from surgery.model.low_rank_entry import LowRankEntry
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.loading import LOADING, load_config, without_initial_values
from surgery.running.source import attention_dtype

if TYPE_CHECKING:
    from surgery.model import SurgeryForCausalLM

MODEL_TYPES = (MODEL_TYPE, *LATENT_FAMILIES)
MOST_KINDS = 6
"""Lines for the attention of layers that differ."""
NUMBER = re.compile(r"\d[\d,.]*(?<![,.])")


def converted_facts(reader: CheckpointReader, contexts: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of an :class:`surgery.inspection.inspect.Inspection`.

    Raises SurgeryError: the config is damaged or incomplete.
    """
    config, dtype = load_config(reader.path), attention_dtype(reader)
    own = config if config.model_type == MODEL_TYPE else None
    family = FAMILIES.get(getattr(own, "base_model_type", None))
    layers = [layer for layer in range(config.num_hidden_layers) if not (own and keeps_state(config, layer))]
    stated = reader.config if own else own_config(reader.config, layer_entries(reader.config))
    longest = max(contexts)
    try:
        model = skeleton(stated, dtype)
        bytes_at = dict(zip(contexts, map(kv_bytes_of(reader.config, dtype), contexts), strict=True))
        entries = layer_entries(stated)
        kinds = [_kind(entries[layer], model.config) for layer in layers]
        by_layer = model.kv_layer_bytes(1, longest)
        sizes = [per_token(by_layer[layer] / longest) for layer in layers]
        kinds = [f"{kind}, {size} per token" for kind, size in zip(kinds, sizes, strict=True)]
    except KeyError as error:
        raise SurgeryError(f"config.json of {reader.config['model_type']}: {error} is missing") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        raise SurgeryError(f"config.json of {reader.config['model_type']} is damaged ({error})") from None
    return {
        "name": reader.name,
        "architecture": _architecture(reader, config, kinds, dtype),
        "windows": [family.window(config, layer) if family else None for layer in layers],
        "kv": {
            "bytes_per_token": round(bytes_at[longest] / longest),
            "bytes_per_token_and_layer": round(bytes_at[longest] / longest / len(layers)),
            "bytes_at": bytes_at,
        },
        "targets": [],
    }


def skeleton(config: dict, dtype: torch.dtype) -> SurgeryForCausalLM:
    """Build the model of a config.json on the meta device. Raises SurgeryError: the config is invalid."""
    from transformers import AutoModelForCausalLM

    own_model.register()
    try:
        with torch.device("meta"), without_initial_values():
            return AutoModelForCausalLM.from_config(own_model.SurgeryConfig(**arguments(config)), dtype=dtype)
    except LOADING as error:
        raise SurgeryError(str(error) or repr(error)) from None


def _architecture(reader: CheckpointReader, config: Any, kinds: list[str], dtype: Any) -> dict[str, Any]:
    base = getattr(config, "base_model_type", None)
    return {
        **model_facts(reader, config, dtype),
        "model_type": config.model_type + (f" over {base}" if base else ""),
        "attention": _by_kind(kinds),
        "biases": [],
        "ruined_by": ruinous_formats(reader),
        "qk_norm": any(name.endswith("q_norm.weight") for name in reader.names()),
    }


def _by_kind(kinds: list[str]) -> list[str]:
    """Count the layers of each kind; ranges in place of numbers if there are more kinds than `MOST_KINDS`."""
    groups: dict[str, list[list[str]]] = {}
    is_long = len(set(kinds)) > MOST_KINDS
    for kind in kinds:
        groups.setdefault(NUMBER.sub("{}", kind) if is_long else kind, []).append(NUMBER.findall(kind))
    lines = []
    for kind, numbers in groups.items():
        ends = [(min(column, key=_value), max(column, key=_value)) for column in zip(*numbers, strict=True)]
        ranges = [low if low == high else f"{low} to {high}" for low, high in ends]
        lines.append(f"{len(numbers)} layer{'s' if len(numbers) > 1 else ''}: {kind.format(*ranges)}")
    return lines


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _kind(entry: LayerEntry, config: Any) -> str:
    """Describe a layer's structure in words."""
    if entry.kind is None and caches_latents(config):
        return f"latent rank {config.kv_lora_rank}, {config.qk_rope_head_dim} rotary dimensions"
    if isinstance(entry, LatentEntry):
        rank, stream = getattr(entry, "rank", entry.kv_lora_rank), getattr(entry, "streaming", None)
        tokens = f", the last {stream.sinks + stream.recent:,} tokens" if stream else ""
        return f"latent rank {rank}, {entry.rope_dim} rotary dimensions{tokens}"
    ranks = [getattr(entry, name) for name in ("rank", "key_rank", "value_rank") if hasattr(entry, name)]
    if isinstance(entry, LowRankEntry):
        ranks = [entry.shared_rank + rank for rank in entry.ranks]
    if ranks:
        return f"keys rebuilt from latents of rank {' + '.join(map(str, ranks))}"
    _, kv_heads, head_dim = head_shape(config)
    streaming = getattr(entry, "streaming_heads", 0)
    heads = f"{getattr(entry, 'kv_heads', kv_heads)} KV heads of size {head_dim}"
    return heads + (f", {streaming} of them streaming" if streaming else "")
