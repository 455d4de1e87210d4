"""Views of checkpoints under standard names: fused projections split, language models extracted, tensors renamed."""

from __future__ import annotations

from pathlib import Path

import torch

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.families import FAMILIES
from surgery.families.base import LAYER_PREFIX, MTP_LAYERS, is_mtp_layer
from surgery.families.fused import FUSED
from surgery.families.multimodal import MULTIMODAL, text_names
from surgery.running.loading import load_config
from surgery.running.source_check import open_source


def open_model(source: str | Path, *, dtype: str | None = None) -> CheckpointReader:
    """Open a checkpoint as a view by :func:`unfused`, cast to ``dtype`` or as stored; commands call this first.

    Raises SurgeryError: the checkpoint cannot be read, or has a feature that its family does not support.
    """
    reader = open_source(source)
    return unfused(reader if dtype is None else reader.in_dtype(getattr(torch, dtype)))


def unfused(reader: CheckpointReader) -> CheckpointReader:
    """Return the reader, or a view with the names and config of the family as which the model is read.

    MTP layers after the model's layers are left out, since they read the cache of other layers. Raises SurgeryError:
    the model has a feature that this family does not support.
    """
    reader = language_model(reader)
    model_type = reader.config.get("model_type")
    if model_type in FAMILIES and reader.config.get(MTP_LAYERS):
        layers = reader.config["num_hidden_layers"]
        further = {name: {} for name in reader.names() if is_mtp_layer(name, layers)}
        return reader.seen_as({**reader.config, MTP_LAYERS: 0}, further)
    family = FUSED.get(model_type)
    if family is None:
        return reader
    config, of_layer, parts = family.config(reader.config), family.parts(reader.config), {}
    for layer in range(config["num_hidden_layers"]):
        prefix = LAYER_PREFIX.format(layer=layer)
        for module, names in of_layer.items():
            parts[f"{prefix}{module}.weight"] = {f"{prefix}{name}.weight": rows for name, rows in names.items()}
    return reader.seen_as(config, parts)


def language_model(reader: CheckpointReader) -> CheckpointReader:
    """Return the reader, or for a vision-language model a view of its language model.

    Tensors of vision tower and projector keep their names. Families with other tensor names appear under the standard
    names. Raises SurgeryError: the language model is not supported.
    """
    model_type = reader.config.get("model_type")
    if (family := FAMILIES.get(model_type)) is not None and family.renamed is not None:
        config = family.renamed.config(reader.config)
        shapes = {name: reader.info(name).shape for name in reader.names()}
        return reader.seen_as(config, family.renamed.parts(config, shapes))
    if model_type not in MULTIMODAL:
        return reader
    whole = load_config(reader.path)
    text = whole.get_text_config(decoder=True).to_dict()
    if not isinstance(text.get("rope_parameters"), dict):
        raise SurgeryError.at(reader.source, "language models without rotary embeddings are not supported")
    config = {
        **text,
        "tie_word_embeddings": bool(whole.tie_word_embeddings),
        "dtype": str(whole.dtype or "float32").removeprefix("torch."),
        **{name: reader.config[name] for name in ("quantization_config",) if name in reader.config},
    }
    names = text_names(reader.names(), str(reader.source))
    parts = {stored: {name: reader.info(stored).shape[0]} for stored, name in names.items()}
    return reader.seen_as(config, parts, put_back=True)
