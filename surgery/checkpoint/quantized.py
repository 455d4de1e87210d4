"""Weights in 8 bits, which are dequantized while reading: an element is its code times a scale.

- fp8 with ``weight_block_size``, DeepSeek's: ``X.weight`` in e4m3, ``X.weight_scale_inv`` a scale per block;
- compressed-tensors, float- and int-quantized: ``X.weight`` in e4m3 or int8, ``X.weight_scale`` by tensor or row.

Packed formats, mostly of 4 bits, are refused: a result has 16-bit weights, whose original loses less.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.stores import Store
from surgery.checkpoint.tensors import TensorInfo, describe
from surgery.common.errors import SurgeryError

WEIGHT, SCALE, INVERSE = "weight", "weight_scale", "weight_scale_inv"
UNKNOWN = ("weight_zero_point", "weight_global_scale", "input_scale", "input_zero_point")
"""Tensors of unsupported variants: asymmetric, with global scales, or with static activation scales."""

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32)
PACKED = ("awq", "bitsandbytes", "gptq")
FORMATS = {"int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"}
"""Supported formats of compressed-tensors; in mixed-precision each group has a format."""

HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"

ReadRows = Callable[[str, int, int], Tensor]
"""Function that reads rows [first, after) of a stored 1D or 2D tensor."""


@dataclass(frozen=True)
class Scaled:
    """Matrix of codes with a scale per block of rows and columns, as stored tensors.

    ``scales`` is the shape of the scales, [rows, columns]; ``dtype`` that of the dequantized values.
    """

    codes: str
    scale: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    scales: tuple[int, int]
    dtype: torch.dtype
    kind: str

    @property
    def parts(self) -> tuple[str, str]:
        return self.codes, self.scale

    def rows(self, read: ReadRows, first: int, after: int) -> Tensor:
        """Dequantize rows [first, after) to float32 [after - first, columns]."""
        values = read(self.codes, first, after).float()
        low, high = first // self.block[0], -(-after // self.block[0])
        flat = self.scales[0] == 1  # may be stored as a scalar or a vector
        scale = read(self.scale, 0, 1).view(1, -1) if flat else read(self.scale, low, high).view(high - low, -1)
        of_row = torch.arange(first, after) // self.block[0] - (0 if flat else low)
        of_column = torch.arange(self.shape[1]) // self.block[1]
        return values * scale.float()[of_row][:, of_column]


def is_quantized(store: Store) -> bool:
    """Return whether any tensor has an integer dtype of packed values or an 8-bit float dtype."""
    dtypes = {info.dtype for info in store.infos.values()}
    return any(dtype in INTEGERS or (dtype.is_floating_point and dtype.itemsize < 2) for dtype in dtypes)


def quantized_matrices(config: Mapping[str, Any], store: Store, folder: Path) -> dict[str, Scaled]:
    """Return a checkpoint's quantized matrices by the names of their weights; empty for other formats.

    ``folder`` has the model card, which may name the original checkpoint. Raises SurgeryError: packed weights, or
    tensors that do not match their format.
    """
    entry = config.get("quantization_config")
    if not isinstance(entry, dict):
        return {}
    if packed := _packed(entry):
        raise SurgeryError.at(
            folder,
            f"the weights are quantized ({packed}), in a format that is not read; convert the original 16-bit "
            f"checkpoint{_original(config, folder)}, and quantize the result",
        )
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    dtype = dtype if dtype in (torch.float16, torch.float32) else torch.bfloat16
    matrices: list[Scaled] = []
    if entry.get("quant_method") == "fp8" and (block := _block(entry)) is not None:
        matrices = [_by_block(module, store, block) for module in _modules(store, INVERSE)]
    elif entry.get("quant_method") == "compressed-tensors":
        matrices = [_plain(module, store, dtype) for module in _modules(store, SCALE)]
    else:
        return {}
    parts = {part for matrix in matrices for part in matrix.parts}
    for name, info in store.infos.items():
        if name.endswith(UNKNOWN):
            raise SurgeryError(f"{name}: this kind of quantization is not supported; dequantize the checkpoint first")
        if name not in parts and info.dtype.itemsize == 1 and info.dtype.is_floating_point:
            raise SurgeryError(f"{name}: {describe(info)} has no scales")
    return {matrix.codes: matrix for matrix in matrices}


def _packed(entry: Mapping[str, Any]) -> str | None:
    """Return the name of a packed or otherwise unsupported format; None for a supported or unknown one."""
    if (method := entry.get("quant_method")) in PACKED:
        return method
    if method != "compressed-tensors":
        return None
    groups = entry.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    formats = {str(each.get("format")) for each in (entry, *groups) if isinstance(each, dict) and each.get("format")}
    sparsity = entry.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        formats.add("sparse weights")
    if entry.get("transform_config"):
        formats.add("transform_config")
    return next((f"{method}, {name}" for name in sorted(formats - FORMATS)), None)


def _original(config: Mapping[str, Any], folder: Path) -> str:
    """Return " (org/name)", the base model that the model card or config.json names; empty if unknown."""
    try:
        card = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        card = ""
    match = re.search(rf"^base_model:\s*(?:-\s*)?({HUB_ID})\s*$", card, re.MULTILINE)
    name = match[1] if match else str(config.get("_name_or_path"))
    return f" ({name})" if re.fullmatch(HUB_ID, name) else ""


def _by_block(module: str, store: Store, block: tuple[int, int]) -> Scaled:
    info, scale = _info(module, WEIGHT, store), _info(module, INVERSE, store)
    scale_shape = tuple(-(-size // of) for size, of in zip(info.shape, block, strict=False))
    if info.dtype != torch.float8_e4m3fn or len(info.shape) != 2 or scale.shape != scale_shape:
        raise _misfit(module, info, scale)
    return Scaled(module + WEIGHT, module + INVERSE, info.shape, block, scale_shape, torch.bfloat16, "FP8")


def _plain(module: str, store: Store, dtype: torch.dtype) -> Scaled:
    """Return a matrix with one scale, or one per row."""
    info, scale = _info(module, WEIGHT, store), _info(module, SCALE, store)
    rows = scale.shape[0] if len(scale.shape) == 2 else 1
    fits = info.dtype in (torch.int8, torch.float8_e4m3fn) and len(info.shape) == 2 and 0 not in info.shape
    fits = fits and scale.nbytes == rows * scale.dtype.itemsize and scale.dtype.is_floating_point
    if not fits or rows not in (1, info.shape[0]):
        raise _misfit(module, info, scale)
    kind = "int8" if info.dtype == torch.int8 else "fp8"
    block = info.shape[0] // rows, info.shape[1]
    return Scaled(module + WEIGHT, module + SCALE, info.shape, block, (rows, 1), dtype, kind)


def _block(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    block = entry.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        return None
    return block[0], block[1]


def _modules(store: Store, part: str) -> list[str]:
    """List the modules that have a tensor named ``part``, each with its final dot."""
    return [name.removesuffix(part) for name in store.infos if name.endswith("." + part)]


def _info(module: str, part: str, store: Store) -> TensorInfo:
    if module + part not in store.infos:
        raise SurgeryError(f"{module}{part}: missing, but required by quantization_config; download it again")
    return store.infos[module + part]


def _misfit(module: str, codes: TensorInfo, scale: TensorInfo) -> SurgeryError:
    return SurgeryError(f"{module}{WEIGHT}: {describe(codes)} does not fit its scales, {describe(scale)}")
