"""Contradictions between a checkpoint's config.json and its tensors, reported with cause and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import transformers

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.families.base import MTP_LAYERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


def check_stored(reader: CheckpointReader, text: Any) -> None:
    """Check the stored dtypes and the number of layers of the config ``text``, before the class is built.

    Raises SurgeryError: a weight is not floating-point with at least 16 bits, or there are more layers than tensors.
    """
    for name in reader.names():
        dtype = reader.info(name).dtype
        packed = dtype.itemsize < 2 or not dtype.is_floating_point
        if packed and name.endswith((".weight", ".bias")) and not BUFFERS.search(name):
            raise SurgeryError(
                f"{reader.source}: {name} is stored in {str(dtype).removeprefix('torch.')}, but config.json has no "
                "quantization_config; use the checkpoint before quantization"
            )
    layers = getattr(text, "num_hidden_layers", None)
    if type(layers) is int and layers > len(reader.names()):
        raise SurgeryError(f"{_config(reader)}: num_hidden_layers is {layers:,}, but there are fewer tensors; {WHOLE}")


def check_class(reader: CheckpointReader, model_class: type[PreTrainedModel]) -> None:
    """Check that ``architectures`` agrees with ``model_type``.

    Raises SurgeryError: ``architectures`` names another class of transformers.
    """
    architectures = reader.config.get("architectures") or []
    if not isinstance(architectures, list) or model_class.__name__ in architectures:
        return
    for name in architectures:
        if isinstance(name, str) and name.isidentifier() and isinstance(getattr(transformers, name, None), type):
            raise SurgeryError(
                f"{_config(reader)}: architectures is {name}, but model_type {reader.config['model_type']!r} is "
                f"{model_class.__name__}; correct the wrong one, or use a causal language model"
            )


def check_comparison(reader: CheckpointReader, text: Any, comparison: Comparison) -> None:
    """Check that the stored tensors are those of the class.

    Raises SurgeryError: they differ; reports the first cause that applies.
    """
    for cause in CAUSES:
        if message := cause(reader, text, comparison):
            raise SurgeryError(message)


def _config(reader: CheckpointReader) -> str:
    return f"{reader.source}/config.json" if reader.source.is_dir() else str(reader.source)


def _prefix(reader: CheckpointReader, text: Any, comparison: Comparison) -> str | None:
    """Report tensor names with a missing or additional prefix."""
    names = reader.names()
    if "embed_tokens.weight" in names:
        return (
            f"{reader.source}: tensor names lack the prefix 'model.', as of a model saved without its head; load it "
            f"with {comparison.class_name}.from_pretrained, then call save_pretrained"
        )
    missing = set(comparison.missing)
    for name in names if missing else ():
        parts = name.split(".")
        starts = (start for start in range(1, len(parts)) if ".".join(parts[start:]) in missing)
        wrapper = next((".".join(parts[:start]) for start in starts), None)
        if wrapper is None and "_orig_mod" in parts:
            wrapper = "_orig_mod"
        if wrapper is not None:
            return (
                f"{reader.source}: tensor {name} has the prefix {wrapper!r} of a training wrapper; save the unwrapped "
                "model, or remove the prefix"
            )
    return None


def _sharded(reader: CheckpointReader, text: Any, comparison: Comparison) -> str | None:
    """Report empty tensors, as saved under ZeRO-3."""
    empty = next((name for name, stored, _ in comparison.mismatched if 0 in stored), None)
    return empty and f"{reader.source}: {empty} is empty, as saved under ZeRO-3; gather the weights (zero_to_fp32.py)"


def _layers(reader: CheckpointReader, text: Any, comparison: Comparison) -> str | None:
    """Report a number of layers other than ``num_hidden_layers``."""
    layers = text.num_hidden_layers
    mtp_layers = reader.config.get(MTP_LAYERS) or 0
    last = max(map(_layer, comparison.unexpected), default=-1)
    absent = {*map(_layer, comparison.missing)} - {*map(_layer, reader.names())} - {-1}
    if last >= layers + mtp_layers:
        count = last + 1
    elif absent:
        count = min(absent)
    else:
        return None
    return f"{_config(reader)}: num_hidden_layers is {layers}, but the weights have {count} layers; {WHOLE}"


def _vocabulary(reader: CheckpointReader, text: Any, comparison: Comparison) -> str | None:
    """Report a number of embedding or head rows other than ``vocab_size``."""
    size = getattr(text, "vocab_size", None)
    rows = {
        stored[0]
        for name, stored, shape in comparison.mismatched
        if len(stored) == 2 and shape[0] == size and stored[1:] == shape[1:] and _layer(name) < 0
    }
    one_fits = any(reader.info(name).shape == (size, text.hidden_size) for name in reader.names())
    if len(rows) != 1 or one_fits:
        return None
    return (
        f"{_config(reader)}: vocab_size is {size:,}, but the embedding has {min(rows):,} rows; set vocab_size to "
        f"{min(rows)} if the vocabulary was resized"
    )


def _shape(reader: CheckpointReader, text: Any, comparison: Comparison) -> str | None:
    """Report any other mismatched shape."""
    if comparison.unfit:
        return (
            f"{reader.source}: shapes of the parts of {comparison.unfit[0]} do not match; download the checkpoint again"
        )
    for name, stored, shape in comparison.mismatched:
        return (
            f"{reader.source}: {name} has shape {list(stored)}, but config.json requires {list(shape)}"
            f"{_more(len(comparison.mismatched))}; {WHOLE}"
        )
    return None


def _head(reader: CheckpointReader, text: Any, comparison: Comparison) -> str | None:
    """Report a missing output head without tied embeddings in the config."""
    if comparison.missing != ("lm_head.weight",):
        return None
    return (
        f"{reader.source}: lm_head.weight is missing, and config.json does not tie it to the embedding; set "
        "tie_word_embeddings to true if they are tied, or use a checkpoint with lm_head.weight"
    )


def _missing(reader: CheckpointReader, text: Any, comparison: Comparison) -> str | None:
    if not comparison.missing:
        return None
    return (
        f"{reader.source}: {comparison.missing[0]} is missing{_more(len(comparison.missing))}, which "
        f"{comparison.class_name} would fill with random values; download the checkpoint again, or {WHOLE}"
    )


def _unexpected(reader: CheckpointReader, text: Any, comparison: Comparison) -> str | None:
    """Report tensors in a layer that the class would drop."""
    names = [name for name in comparison.unexpected if -1 < _layer(name) < text.num_hidden_layers]
    names = [name for name in names if not BUFFERS.search(name)]
    if not names:
        return None
    return (
        f"{reader.source}: unexpected tensor {names[0]}: {comparison.class_name} with this config.json has none"
        f"{_more(len(names))}; {WHOLE}"
    )


def _layer(name: str) -> int:
    """Return the index of the decoder layer of a tensor; -1 for other tensors."""
    match = LAYER.search(name)
    return int(match[1]) if match else -1


def _more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""


CAUSES: tuple[Callable[[CheckpointReader, Any, Comparison], str | None], ...] = (
    *(_prefix, _sharded, _layers, _vocabulary, _shape, _head, _missing, _unexpected),
)
"""Checks for causes, the most explanatory first."""
