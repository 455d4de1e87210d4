"""Check that a checkpoint's tensors are those that its config.json describes.

transformers fills missing tensors with random values and drops unexpected ones, with only a warning. Therefore the
class is built on the meta device and compared with the stored tensors, before any work.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.utils import logging

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.families import LATENT_FAMILIES, WHY_NOT
from surgery.families.base import MTP_LAYERS
from surgery.families.multimodal import MULTIMODAL
from surgery.running.loading import causal_class, load_config, loading, without_initial_values
from surgery.running.plain_decoder import is_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS = 16_384
"""Rows of embedding and head that are compared at a time."""
LAYER = re.compile(r"^(?:(?:model|language_model|transformer|gpt_neox)\.)*(?:layers|h)\.(\d{1,9})\.")
BUFFERS = re.compile(r"\.(attn|attention)\.(bias|masked_bias)$")
"""Causal-mask buffers in early checkpoints of GPT-2 and GPT-NeoX."""
WHOLE = "use the config.json of these weights"


@dataclass(frozen=True)
class Comparison:
    """Differences between the stored tensors and those of a class, by the class's names.

    Attributes:
        unexpected: stored tensors that the class neither has nor ignores.
        mismatched: names with the stored shape and the class's shape.
        unfit: tensors of the class whose stored parts cannot be merged.
        tied: pairs of tensors that are tied in the class, but both stored.
    """

    class_name: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    unfit: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()


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
        _check_stored(reader, text)
        _check_class(reader, model_class)
        comparison = _compare(reader, model_class, config)
        if fault := _fault(reader, text, comparison):
            raise SurgeryError.at(reader.source, fault)
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


def _check_stored(reader: CheckpointReader, text: Any) -> None:
    """Check the stored dtypes and the number of layers of the config ``text``, before the class is built.

    Raises SurgeryError: a weight is not floating-point with at least 16 bits, or there are more layers than tensors.
    """
    for name in reader.names():
        dtype = reader.info(name).dtype
        packed = dtype.itemsize < 2 or not dtype.is_floating_point
        if packed and name.endswith((".weight", ".bias")) and not BUFFERS.search(name):
            raise SurgeryError.at(
                reader.source,
                f"{name} is stored in {str(dtype).removeprefix('torch.')}, but config.json has no "
                "quantization_config; use the checkpoint before quantization",
            )
    layers = getattr(text, "num_hidden_layers", None)
    if type(layers) is int and layers > len(reader.names()):
        raise SurgeryError.at(reader.source, f"num_hidden_layers is {layers:,}, but there are fewer tensors; {WHOLE}")


def _check_class(reader: CheckpointReader, model_class: type[PreTrainedModel]) -> None:
    """Raise SurgeryError if ``architectures`` names another class of transformers than ``model_type``."""
    architectures = reader.config.get("architectures") or []
    if not isinstance(architectures, list) or model_class.__name__ in architectures:
        return
    for name in architectures:
        if isinstance(name, str) and name.isidentifier() and isinstance(getattr(transformers, name, None), type):
            raise SurgeryError.at(
                reader.source,
                f"architectures is {name}, but model_type {reader.config['model_type']!r} is {model_class.__name__}; "
                "correct the wrong one, or use a causal language model",
            )


def _fault(reader: CheckpointReader, text: Any, comparison: Comparison) -> str | None:
    """Describe the first difference from the class and its remedy; None if all its tensors are stored."""
    if "embed_tokens.weight" in reader.names():
        return (
            "tensor names lack the prefix 'model.', as of a model saved without its head; load it with "
            f"{comparison.class_name}.from_pretrained, then call save_pretrained"
        )
    if comparison.unfit:
        return f"shapes of the parts of {comparison.unfit[0]} do not match; download the checkpoint again"
    for name, stored, shape in comparison.mismatched:
        more = _more(len(comparison.mismatched))
        return f"{name} has shape {list(stored)}, but config.json requires {list(shape)}{more}; {WHOLE}"
    layers = text.num_hidden_layers
    mtp = range(layers, layers + (reader.config.get(MTP_LAYERS) or 0))
    names = [name for name in comparison.unexpected if (layer := LAYER.search(name)) and int(layer[1]) not in mtp]
    names = [name for name in names if not BUFFERS.search(name)]
    if comparison.missing:
        stored = f"; {comparison.unexpected[0]} is stored instead" if comparison.unexpected else ""
        return (
            f"{comparison.missing[0]} is missing{_more(len(comparison.missing))}, which {comparison.class_name} would "
            f"fill with random values{stored}; rename the tensors, download the checkpoint again, or {WHOLE}"
        )
    if names:
        return f"unexpected tensor {names[0]}{_more(len(names))}: {comparison.class_name} has none; {WHOLE}"
    return None


def _more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""


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
