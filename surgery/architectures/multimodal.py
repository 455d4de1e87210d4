"""Converted vision-language model, in its class or in the custom model class: config.json and tensor names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from surgery.architectures.custom_class import MODEL_TYPE as OWN
from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.config_file import with_legacy_rope_keys
from surgery.families.multimodal import INSIDE, PREFIXES, put_back

MODEL_TYPE = "surgery_pictures"

SHARED, ROPE = {"tie_word_embeddings", "dtype"}, {"rope_theta", "rope_scaling"}


def whole_config(reader: CheckpointReader, config: dict[str, Any]) -> dict[str, Any]:
    """Return the output config.json: that of a language model, within the vision-language one if the source is one."""
    if not reader.stored_names:
        return config
    whole = reader.stored_config
    if config["model_type"] != OWN:
        return put_back(whole, with_legacy_rope_keys(reader.config), config)
    from surgery.model import PICTURES_AUTO_MAP

    own = {
        "model_type": MODEL_TYPE,
        "architectures": ["SurgeryForConditionalGeneration"],
        "auto_map": PICTURES_AUTO_MAP,
    }
    if whole["model_type"] != MODEL_TYPE:
        own["base_model_type"] = whole["model_type"]
    text = {name: value for name, value in config.items() if name not in ("architectures", "auto_map")}
    if "text_config" not in whole:  # early checkpoints of Qwen2.5-VL have its fields on top
        whole = {name: value for name, value in whole.items() if name not in config.keys() - SHARED | ROPE}
    return {**whole, **own, "text_config": text}


def whole_names(reader: CheckpointReader, config: dict[str, Any], tensors: Iterable[str]) -> dict[str, str]:
    """Map tensors of the language model, vision tower and projector to their names in the output checkpoint.

    The custom model class needs the names of the source's transformers class; published checkpoints may have others.
    """
    if not reader.stored_names or config["model_type"] != OWN:
        return reader.stored_names
    native, alone = PREFIXES[0], PREFIXES[-1]
    others = "" if any(name.startswith(native) for name in reader.stored_names.values()) else INSIDE
    extra_names = {name for name in reader.names() if name not in reader.stored_names}
    stored = {}
    for name in tensors:
        if name in extra_names:
            stored[name] = name if name.startswith(INSIDE) else others + name
        else:
            stored[name] = native + name.removeprefix(alone) if name.startswith(alone) else name
    return stored
