"""Supported formats of quantized checkpoints, detected by config.json and tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from surgery.checkpoint.quantized.bitsandbytes_format import bitsandbytes
from surgery.checkpoint.quantized.packed_columns import awq, gptq
from surgery.checkpoint.quantized.parts import Quantization
from surgery.checkpoint.quantized.scaled import compressed_tensors, fp8
from surgery.checkpoint.stores import Store

READERS: dict[str, Callable[[dict[str, Any], Store, torch.dtype], Quantization | None]] = {
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "gptq": gptq,
}
"""Readers by ``quant_method``. Arguments: ``quantization_config``, store, dtype of the dequantized values."""


PACKED = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32)


def is_quantized(store: Store) -> bool:
    """Return whether any tensor has an integer dtype of packed values or an 8-bit float dtype."""
    dtypes = {info.dtype for info in store.infos.values()}
    return any(dtype in PACKED or (dtype.is_floating_point and dtype.itemsize < 2) for dtype in dtypes)


def quantization_of(config: Mapping[str, Any], store: Store) -> Quantization | None:
    """Return the quantization of a checkpoint's matrices; None for an unquantized or unsupported checkpoint.

    Raises SurgeryError: the format is supported, but tensors do not match it.
    """
    config_entry = config.get("quantization_config")
    if not isinstance(config_entry, dict) or (method := config_entry.get("quant_method")) not in tuple(READERS):
        return None
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    dtype = dtype if dtype in (torch.float16, torch.float32) else torch.bfloat16
    quantization = READERS[method](config_entry, store, dtype)
    return quantization if quantization and quantization.matrices else None
