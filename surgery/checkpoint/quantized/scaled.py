"""Symmetric quantization formats: an element is its code times a scale.

- fp8 with ``weight_block_size``, DeepSeek's: ``X.weight`` in e4m3, ``X.weight_scale_inv`` a scale per block;
- compressed-tensors, pack-quantized: ``X.weight_packed``, 4- or 8-bit codes plus 2^(bits - 1) in int32 along a row,
  least significant first; ``X.weight_scale`` by row and group of columns; ``X.weight_shape``;
- compressed-tensors, int- and float-quantized: ``X.weight`` in int8 or e4m3, ``X.weight_scale``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.dequantized_store import Matrix, ReadRows
from surgery.checkpoint.quantized.parts import WEIGHT, Quantization, misfit, modules, required_info
from surgery.checkpoint.stores import Store
from surgery.checkpoint.tensors import TensorInfo, describe
from surgery.common.errors import SurgeryError

PACKED, SCALE, SHAPE, INVERSE = "weight_packed", "weight_scale", "weight_shape", "weight_scale_inv"
UNKNOWN = ("weight_zero_point", "weight_g_idx", "weight_global_scale", "input_scale", "input_zero_point")
"""Tensors of unsupported variants: asymmetric, reordered, with global scales, or with static activation scales."""

PACKED_BITS = ("4", "8")
FORMATS = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"}
"""Supported formats of compressed-tensors; in mixed-precision each group has a format."""


def fp8(entry: dict[str, Any], store: Store, dtype: torch.dtype) -> Quantization | None:
    """Read block-quantized FP8 models; None if the config has no block size."""
    if (block := _block(entry)) is None:
        return None
    matrices = {module + WEIGHT: _by_block(module, store, block) for module in modules(store, INVERSE)}
    return Quantization("FP8", _complete(matrices, store))


def compressed_tensors(entry: dict[str, Any], store: Store, dtype: torch.dtype) -> Quantization:
    """Read the format of the compressed-tensors package.

    Raises SurgeryError: the variant of the format is not supported.
    """
    _check_compressed(entry)
    packed = modules(store, PACKED)
    bits = _bits(entry) if packed else 0
    matrices = {module: _packed(module, store, bits, dtype) for module in packed}
    matrices |= {module: _plain(module, store, dtype) for module in modules(store, SCALE) if module not in matrices}
    name = " and ".join(sorted({matrix.kind for matrix in matrices.values()}))
    return Quantization(name, _complete({module + WEIGHT: matrix for module, matrix in matrices.items()}, store))


@dataclass(frozen=True)
class Scaled:
    """Matrix of codes with a scale per block of rows and columns, as stored tensors; ``others`` are redundant.

    ``scales`` is their shape, [rows, columns]; ``bits`` the width of codes packed in int32, None for unpacked codes.
    """

    codes: str
    scale: str
    shape: tuple[int, int]
    block: tuple[int, int]
    scales: tuple[int, int]
    dtype: torch.dtype
    kind: str
    bits: int | None = None
    others: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        return self.codes, self.scale, *self.others

    def rows(self, read: ReadRows, first: int, after: int) -> Tensor:
        """Dequantize rows [first, after) to float32 [after - first, columns]."""
        codes = read(self.codes, first, after)
        values = codes.float() if self.bits is None else self._unpacked(codes)
        low, high = first // self.block[0], -(-after // self.block[0])
        flat = self.scales[0] == 1  # may be stored as a scalar or a vector
        scale = read(self.scale, 0, 1).view(1, -1) if flat else read(self.scale, low, high).view(high - low, -1)
        of_row = torch.arange(first, after) // self.block[0] - (0 if flat else low)
        of_column = torch.arange(self.shape[1]) // self.block[1]
        return values * scale.float()[of_row][:, of_column]

    def _unpacked(self, words: Tensor) -> Tensor:
        start = torch.arange(self.shape[1]) * self.bits
        codes = words[:, start // 32].bitwise_right_shift((start % 32).int()) & (2**self.bits - 1)
        return (codes - 2 ** (self.bits - 1)).float()


def _by_block(module: str, store: Store, block: tuple[int, int]) -> Scaled:
    info, scale = required_info(module, WEIGHT, store), required_info(module, INVERSE, store)
    scale_shape = tuple(-(-size // of) for size, of in zip(info.shape, block, strict=False))
    if info.dtype != torch.float8_e4m3fn or len(info.shape) != 2 or scale.shape != scale_shape:
        raise misfit(module + WEIGHT, info, scale)
    return Scaled(module + WEIGHT, module + INVERSE, info.shape, block, scale_shape, torch.bfloat16, "fp8")


def _packed(module: str, store: Store, bits: int, dtype: torch.dtype) -> Scaled:
    words, scale, shape = (required_info(module, part, store) for part in (PACKED, SCALE, SHAPE))
    if shape.dtype not in (torch.int32, torch.int64) or shape.nbytes != 2 * shape.dtype.itemsize:
        raise SurgeryError(f"{module}{SHAPE}: {describe(shape)} is not the shape of a matrix")
    raw = torch.empty(shape.nbytes, dtype=torch.uint8)
    store.read(module + SHAPE, [(0, shape.nbytes)], raw)
    size = tuple(raw.view(shape.dtype).tolist())
    if words.dtype != torch.int32 or words.shape != (size[0], -(-size[1] * bits // 32)):
        raise SurgeryError(f"{module}{WEIGHT}: {describe(words)} does not hold {list(size)} values of {bits} bits")
    block, scales = _scales(module, words, size, scale)
    parts = {"codes": module + PACKED, "scale": module + SCALE, "others": (module + SHAPE,)}
    return Scaled(**parts, shape=size, block=block, scales=scales, dtype=dtype, kind=f"int{bits}", bits=bits)


def _plain(module: str, store: Store, dtype: torch.dtype) -> Scaled:
    info, scale = required_info(module, WEIGHT, store), required_info(module, SCALE, store)
    if info.dtype not in (torch.int8, torch.float8_e4m3fn) or len(info.shape) != 2:
        raise misfit(module + WEIGHT, info, scale)
    kind = "int8" if info.dtype == torch.int8 else "fp8"
    block, scales = _scales(module, info, info.shape, scale)
    return Scaled(module + WEIGHT, module + SCALE, info.shape, block, scales, dtype, kind)


def _scales(
    module: str, codes: TensorInfo, shape: tuple[int, ...], scale: TensorInfo
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return block shape and scale shape: one scale per tensor, per row, or per group in a row."""
    rows, columns = scale.shape if len(scale.shape) == 2 else (1, 1)
    fits = scale.nbytes == rows * columns * scale.dtype.itemsize > 0 and scale.dtype.is_floating_point
    if not fits or 0 in shape or rows not in (1, shape[0]) or shape[1] % columns:
        raise misfit(module + WEIGHT, codes, scale)
    return (shape[0] // rows, shape[1] // columns), (rows, columns)


def _complete(matrices: dict[str, Scaled], store: Store) -> dict[str, Matrix]:
    """Check that no tensor of an unsupported variant and no fp8 tensor without scale is left; return the matrices."""
    parts = {part for matrix in matrices.values() for part in matrix.parts}
    for name, info in store.infos.items():
        if name.endswith(UNKNOWN):
            raise SurgeryError(f"{name}: this kind of quantization is not supported; dequantize the checkpoint first")
        if name not in parts and info.dtype.itemsize == 1 and info.dtype.is_floating_point:
            raise SurgeryError(f"{name}: {describe(info)} has no scales")
    return dict(matrices)


def _block(entry: dict[str, Any]) -> tuple[int, int] | None:
    block = entry.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        return None
    return block[0], block[1]


def _check_compressed(entry: dict[str, Any]) -> None:
    """Refuse compressed-tensors configs with unsupported formats, sparsity or weight transforms.

    Raises SurgeryError: names the unsupported feature.
    """
    groups = entry.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    formats = {str(each.get("format")) for each in (entry, *groups) if isinstance(each, dict) and each.get("format")}
    sparsity = entry.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        formats.add("sparse weights")
    if entry.get("transform_config"):
        formats.add("rotated weights (transform_config)")
    if unknown := sorted(formats - FORMATS):
        raise SurgeryError(f"config.json: compressed-tensors with {unknown[0]} is not supported; dequantize it first")


def _bits(entry: dict[str, Any]) -> int:
    """Return the bit width of packed weights, which must be equal in all config groups.

    Raises SurgeryError: the bit widths differ or are not supported.
    """
    groups = entry.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    weights = [weight for group in groups if isinstance(weight := group.get("weights"), dict)]
    bits = sorted({str(weight.get("num_bits"))[:100] for weight in weights})
    if len(bits) != 1 or bits[0] not in PACKED_BITS:
        raise SurgeryError(f"config.json: num_bits {bits} is not supported; use {' or '.join(PACKED_BITS)}")
    return int(bits[0])
