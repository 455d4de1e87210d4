"""Result of a vision-language model, in its class or in ours: config.json, and names of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from surgery.architectures.own_class import MODEL_TYPE as OWN
from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.config_file import with_rope_beside
from surgery.families.multimodal import INSIDE, PREFIXES, put_back

MODEL_TYPE = "surgery_pictures"

SHARED, ROPE = {"tie_word_embeddings", "dtype"}, {"rope_theta", "rope_scaling"}


def whole_config(reader: CheckpointReader, config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a result, whose language model's is ``config``, and all of it where there is nothing next to.

    Args:
        reader: of the source.
    """
    if not reader.stored_names:
        return config
    whole = reader.stored_config
    if config["model_type"] != OWN:
        return put_back(whole, with_rope_beside(reader.config), config)
    from surgery.model import PICTURES_AUTO_MAP

    own = {"architectures": ["SurgeryForPicturesAndText"], "model_type": MODEL_TYPE, "auto_map": PICTURES_AUTO_MAP}
    if whole["model_type"] != MODEL_TYPE:
        own["base_model_type"] = whole["model_type"]
    text = {name: value for name, value in config.items() if name not in ("architectures", "auto_map")}
    if "text_config" not in whole:  # early checkpoints of Qwen2.5-VL say it at the top
        whole = {name: value for name, value in whole.items() if name not in config.keys() - SHARED | ROPE}
    return {**whole, **own, "text_config": text}


def whole_names(reader: CheckpointReader, config: dict[str, Any], tensors: Iterable[str]) -> dict[str, str]:
    """Map ``tensors``, those of a language model and of the parts next to it, to their names in the files of a result.

    The own class is read under the names of the source's class alone, which published checkpoints need not have.
    """
    if not reader.stored_names or config["model_type"] != OWN:
        return reader.stored_names
    native, alone = PREFIXES[0], PREFIXES[-1]
    others = "" if any(name.startswith(native) for name in reader.stored_names.values()) else INSIDE
    beside = {name for name in reader.names() if name not in reader.stored_names}
    stored = {}
    for name in tensors:
        if name in beside:
            stored[name] = name if name.startswith(INSIDE) else others + name
        else:
            stored[name] = native + name.removeprefix(alone) if name.startswith(alone) else name
    return stored
