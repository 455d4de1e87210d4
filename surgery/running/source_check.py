"""Check that a checkpoint's tensors are those that its config.json describes.

transformers fills missing tensors with random values and drops unexpected ones, with only a warning. Therefore the
class is built on the meta device and compared with the stored tensors, before any work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from surgery.checkpoint import CheckpointReader
from surgery.families import LATENT_FAMILIES, WHY_NOT
from surgery.families.multimodal import MULTIMODAL
from surgery.running.loading import causal_class, load_config, loading, without_initial_values
from surgery.running.plain_decoder import is_plain
from surgery.running.source_faults import Comparison, check_class, check_comparison, check_stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS = 16_384
"""Rows of embedding and head that are compared at a time."""


def open_source(source: str | Path, *, trust_remote_code: bool = False) -> CheckpointReader:
    """Open a checkpoint and compare it with its class, if that is not remote code. Every command calls this first.

    Raises SurgeryError: the checkpoint cannot be read, or its tensors are not those that its config.json describes.
    """
    reader = CheckpointReader.open(source)
    return reader if trust_remote_code and "auto_map" in reader.config else checked(reader)


def checked(reader: CheckpointReader) -> CheckpointReader:
    """Compare a checkpoint with its class; return it with its config.json corrected from the tensors.

    It is returned unchanged if it is a plain decoder, if transformers lacks the class, if its family is refused by
    name, or if its weights have an unsupported quantization. Raises SurgeryError: config and tensors contradict each
    other.
    """
    if is_plain(reader):
        return reader
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from surgery import model as own_model

    own_model.register()
    model_type = reader.config.get("model_type")
    unknown = model_type not in CONFIG_MAPPING or _is_refused(model_type)
    if unknown or reader.config.get("quantization_config"):
        return reader
    config = load_config(reader.path)
    try:
        model_class = _class_of(config)
    except KeyError:
        return reader
    if config.model_type != model_type:  # Mistral with layer_types loads as Ministral
        names = {"model_type": config.model_type, "architectures": [model_class.__name__]}
        reader = reader.corrected({**reader.config, **names})
    with loading(f"{reader.source}/config.json"):
        text = config.get_text_config(decoder=True)
        check_stored(reader, text)
        check_class(reader, model_class)
        comparison = _compare(reader, model_class, config)
        check_comparison(reader, text, comparison)
    return _untied(reader, comparison)


def _is_refused(model_type: str) -> bool:
    """Return whether a model type is refused with a specific message."""
    family = LATENT_FAMILIES.get(model_type)
    return model_type in WHY_NOT or (family is not None and family.inside is not None)


def _class_of(config: Any) -> type[PreTrainedModel]:
    """Return the class of the whole checkpoint. Raises KeyError: there is no such class."""
    from transformers import AutoModelForImageTextToText

    if config.model_type in MULTIMODAL:
        return AutoModelForImageTextToText._model_mapping[type(config)]
    return causal_class(config)


def _compare(reader: CheckpointReader, model_class: type[PreTrainedModel], config: Any) -> Comparison:
    """Compare names and shapes with the class, by transformers' loading rules for renamed tensors and fused experts."""
    infos = ((name, reader.info(name)) for name in reader.names())
    stored = tuple((name, tuple(info.shape), info.dtype) for name, info in infos)
    return _compare_stored(_Stored(stored, model_class, config.to_json_string(use_diff=False), config))


@dataclass(frozen=True)
class _Stored:
    """Stored tensors with the class and config that they are compared with, hashable for the cache."""

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    model_class: type[PreTrainedModel]
    values: str
    config: Any = field(compare=False)


@lru_cache(maxsize=16)  # a command opens its source more than once
def _compare_stored(stored: _Stored) -> Comparison:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    model_class = stored.model_class
    state = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in stored.tensors}
    with torch.device("meta"), without_initial_values():
        model = model_class._from_config(stored.config)
    # `from_pretrained` does the same, but accepts a device only if accelerate is installed.
    settings = LoadStateDictConfig(
        ignore_mismatched_sizes=True,
        device_map={"": torch.device("meta")},
        dtype=torch.float32,
        weight_mapping=get_model_conversion_mapping(model),
    )
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        info, _ = convert_and_load_state_dict_in_model(model, state, settings)
    finally:
        if bars:
            logging.enable_progress_bar()
    tied = tuple(model.all_tied_weights_keys.items())
    both = tuple(pair for pair in tied if not info.missing_keys.intersection(pair))
    info.missing_keys.difference_update(head for head, _ in tied)
    model._adjust_missing_and_unexpected_keys(info)
    return Comparison(
        model_class.__name__,
        missing=tuple(sorted(info.missing_keys)),
        unexpected=tuple(sorted(info.unexpected_keys)),
        mismatched=tuple(sorted((name, tuple(stored), tuple(shape)) for name, stored, shape in info.mismatched_keys)),
        unfit=tuple(sorted(info.conversion_errors)),
        tied=both,
    )


def _untied(reader: CheckpointReader, comparison: Comparison) -> CheckpointReader:
    """Untie head and embedding in config.json if both are stored and differ."""
    for pair in comparison.tied:
        stored = [_stored_name(reader, name) for name in pair]
        if None in stored or _equal(reader, *stored):
            continue
        config = {**reader.config, "tie_word_embeddings": False}
        if isinstance(config.get("text_config"), dict):
            config["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
        return reader.corrected(config)
    return reader


def _stored_name(reader: CheckpointReader, name: str) -> str | None:
    """Find the stored tensor of a parameter, with the same or another prefix; None if ambiguous."""
    ending = ".".join(name.split(".")[-2:])
    names = [each for each in reader.names() if each == name or f".{each}".endswith(f".{ending}")]
    return names[0] if len(names) == 1 else None


def _equal(reader: CheckpointReader, name: str, other: str) -> bool:
    """Return whether two matrices have equal values, whatever their dtypes."""
    rows = reader.info(name).shape[0]
    slices = (torch.arange(start, min(start + ROWS, rows)) for start in range(0, rows, ROWS))
    return all(torch.equal(reader.rows(name, index).float(), reader.rows(other, index).float()) for index in slices)
