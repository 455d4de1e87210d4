"""config.json of the custom model class, ``SurgeryForCausalLM``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surgery.checkpoint.config_file import arguments
from surgery.common.errors import SurgeryError
from surgery.families import family_around
from surgery.families.base import MTP_LAYERS, Family
from surgery.model.layer_entry import LayerEntry
from surgery.model.parts import entry_of

MODEL_TYPE = "surgery"


def own_config(source: dict[str, Any], entries: Sequence[LayerEntry], **more: Any) -> dict[str, Any]:
    """Return config.json of the custom model class for a source of a family's class or of the custom model class."""
    own = {"architectures": ["SurgeryForCausalLM"], "model_type": MODEL_TYPE}
    if source["model_type"] != MODEL_TYPE:
        own["base_model_type"] = source["model_type"]
        own |= _rope_layers(source)
    if source.get(MTP_LAYERS):
        own[MTP_LAYERS] = 0
    layers = [entry.to_entry() for entry in entries]
    return with_auto_map({**source, **own, "attention_layers": layers, **more})


def _rope_layers(source: dict[str, Any]) -> dict[str, list[int]]:
    """Return `no_rope_layers`, 1 where a layer has RoPE, if the family's config does not show it to the model class."""
    family = family_around(source["model_type"])
    if family is None or family.rotates is Family.rotates:  # every layer has RoPE
        return {}
    from transformers import CONFIG_MAPPING  # late: slow to import

    from surgery.model.rotary import has_rope

    config = CONFIG_MAPPING[source["model_type"]](**arguments(source))
    layers = range(config.num_hidden_layers)
    rotates = [int(family.rotates(config, layer)) for layer in layers]
    return {} if rotates == [has_rope(config, layer) for layer in layers] else {"no_rope_layers": rotates}


def with_auto_map(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of the custom model class with the `auto_map` of its layers and its cache."""
    from surgery.model import auto_map

    return {**config, "auto_map": auto_map(config)}


def layer_entries(config: dict[str, Any]) -> list[LayerEntry]:
    """Read the attention entry of each layer from a config.json. Raises SurgeryError: an entry is invalid."""
    try:
        return [
            entry_of(entry) for entry in config.get("attention_layers") or [None] * config.get("num_hidden_layers", 0)
        ]
    except ValueError as error:
        raise SurgeryError(f"config.json: attention_layers: {error}") from None
