"""Quantized matrices outside attention, which a conversion can copy in their stored format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.calibration.settings import ConversionSettings
from surgery.checkpoint import CheckpointReader, TensorInfo, TensorSpec
from surgery.common.errors import SurgeryError

ATTENTION, EXPERTS, WEIGHT, HEAD = ".self_attn.", ".experts.", ".weight", "lm_head"

EXCLUDED = {"bitsandbytes": "llm_int8_skip_modules", "compressed-tensors": "ignore", "fp8": "modules_to_not_convert"}
"""Key of ``quantization_config`` that lists unquantized modules, by ``quant_method``."""

INSTEAD = "drop --keep-quantised to dequantize all weights"

Parts = dict[str, dict[str, TensorInfo]]
"""Stored tensors of each quantized matrix, by the name of its weight."""


def asked_to_keep(settings: ConversionSettings) -> bool:
    """Return whether the settings keep quantized matrices; False for settings without the option."""
    return getattr(settings, "keep_quantised", False)


def check_keepable(reader: CheckpointReader, settings: ConversionSettings) -> None:
    """Check that ``keep_quantised`` has matrices to keep, in a format whose results are known to load.

    Raises SurgeryError: the settings, the source or its quantization format do not allow it.
    """
    if not asked_to_keep(settings):
        return
    if settings.weights_dtype is not None:
        raise SurgeryError("keep_quantised keeps weights as stored; drop --weights-dtype", setting="keep_quantised")
    if reader.dequantised_from is None:
        raise SurgeryError(f"{reader.source}: keep_quantised needs quantized weights; drop --keep-quantised")
    matrices = [name for name in reader.names() if reader.stored_parts(name)]
    if not matrices:
        raise SurgeryError(
            f"{reader.source}: its weights are renamed on loading, so they cannot stay quantized; {INSTEAD}"
        )
    entry = reader.as_stored.config["quantization_config"]
    if (method := entry["quant_method"]) not in EXCLUDED:
        raise SurgeryError(
            f"{reader.source}: keep_quantised supports {', '.join(EXCLUDED)}; partly quantized {method} checkpoints "
            f"are untested in transformers; {INSTEAD}"
        )
    if entry.get("kv_cache_scheme"):
        raise SurgeryError(
            f"{reader.source}: has scales for a quantized KV cache, which the conversion replaces; {INSTEAD}"
        )
    if method == "compressed-tensors" and any(EXPERTS in name for name in matrices):
        raise SurgeryError(f"{reader.source}: transformers fuses all experts into one unquantized tensor; {INSTEAD}")
    for name in matrices if method == "fp8" else ():
        sizes = zip(reader.info(name).shape, entry["weight_block_size"], strict=True)
        if ATTENTION not in name and any(size % block for size, block in sizes):
            raise SurgeryError(
                f"{reader.source}: the shape of {name} is not a multiple of the block size, which transformers "
                f"misreads on a CPU; {INSTEAD}"
            )


def kept_matrices(reader: CheckpointReader, settings: ConversionSettings, tensors: Mapping[str, TensorSpec]) -> Parts:
    """Return the stored tensors of the matrices of a result that stay quantized; empty without the option."""
    if not asked_to_keep(settings):
        return {}
    outside = [name for name in tensors if ATTENTION not in name and name in reader]
    return {name: parts for name in outside if (parts := reader.stored_parts(name))}


def quantization_entry(reader: CheckpointReader, tensors: Mapping[str, TensorSpec], parts: Parts) -> dict[str, Any]:
    """Return the config entry of a result with quantized matrices: the source's, with all other modules excluded."""
    if not parts:
        return {}
    entry = reader.as_stored.config["quantization_config"]
    listed = EXCLUDED[entry["quant_method"]]
    matrices = [name for name, spec in tensors.items() if name.endswith(WEIGHT) and len(spec.shape) == 2]
    numbers = [name.removesuffix(WEIGHT) for name in [*matrices, HEAD + WEIGHT] if name not in parts]
    return {"quantization_config": {**entry, listed: list(dict.fromkeys([*(entry.get(listed) or ()), *numbers]))}}
