"""Formats of quantised checkpoints that are read: which matrices are stored how, by config.json and the tensors' names.

- fp8 with ``weight_block_size``, DeepSeek's: ``X.weight`` in e4m3, ``X.weight_scale_inv`` a float for each block;
- compressed-tensors, pack-quantized: ``X.weight_packed``, codes of 4 or 8 bits plus 2^(bits - 1) in int32, the least
  significant first along a row; ``X.weight_scale`` by row and group of columns; ``X.weight_shape``;
- compressed-tensors, int- and float-quantized: ``X.weight`` in int8 or e4m3, ``X.weight_scale``.

All are symmetric: a number is its code times its scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.dequantised_store import Matrix, ReadRows
from surgery.checkpoint.stores import Store
from surgery.checkpoint.tensors import TensorInfo, describe
from surgery.common.errors import SurgeryError

CODES, PACKED, SCALE, SHAPE, INVERSE = "weight", "weight_packed", "weight_scale", "weight_shape", "weight_scale_inv"
UNKNOWN = ("weight_zero_point", "weight_g_idx", "weight_global_scale", "input_scale", "input_zero_point")
"""What asymmetric, reordered and two-level formats store besides, and those of activations in fixed steps."""

PACKED_BITS = (4, 8)
FORMATS = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"}
"""Of compressed-tensors, by its name; mixed: each group says its own."""


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint is quantised.

    Attributes:
        name: of the codes, for people.
    """

    name: str
    matrices: dict[str, Matrix]


def quantisation_of(config: Mapping[str, Any], store: Store) -> Quantisation | None:
    """How the matrices of a checkpoint are stored; None where they are not quantised, or in a format not read here.

    Raises:
        SurgeryError: a format that is read, but tensors that do not fit it.
    """
    said = config.get("quantization_config")
    if not isinstance(said, dict):
        return None
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    dtype = dtype if dtype in (torch.float16, torch.float32) else torch.bfloat16
    if said.get("quant_method") == "fp8" and (block := _block(said)):
        matrices = {name: _by_block(name, store, block) for name in _modules(store, INVERSE)}
        return Quantisation("FP8", _complete(matrices, store))
    if said.get("quant_method") != "compressed-tensors":
        return None
    _check_compressed(said)
    packed = _modules(store, PACKED)
    bits = _bits(said) if packed else 0
    matrices = {name: _packed(name, store, bits, dtype) for name in packed}
    matrices |= {name: _plain(name, store, dtype) for name in _modules(store, SCALE) if name not in matrices}
    if not matrices:
        return None
    return Quantisation(" and ".join(sorted({matrix.kind for matrix in matrices.values()})), _complete(matrices, store))


@dataclass(frozen=True)
class Scaled:
    """A matrix of codes, each times the scale of its block of rows and columns.

    Attributes:
        codes, scale: names of the stored tensors, ``others`` of those that say nothing more.
        block: rows and columns that share a scale.
        scales: of the stored scales, rows and columns.
        bits: of codes that are packed in int32; None for one code a number.
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
        """Rows [first, after), [after - first, columns], in float32."""
        codes = read(self.codes, first, after)
        values = codes.float() if self.bits is None else self._unpacked(codes)
        low, high = first // self.block[0], -(-after // self.block[0])
        flat = self.scales[0] == 1  # may be stored without dimensions, or with one
        scale = read(self.scale, 0, 1).view(1, -1) if flat else read(self.scale, low, high).view(high - low, -1)
        of_row = torch.arange(first, after) // self.block[0] - (0 if flat else low)
        of_column = torch.arange(self.shape[1]) // self.block[1]
        return values * scale.float()[of_row][:, of_column]

    def _unpacked(self, words: Tensor) -> Tensor:
        start = torch.arange(self.shape[1]) * self.bits
        codes = words[:, start // 32].bitwise_right_shift((start % 32).int()) & (2**self.bits - 1)
        return (codes - 2 ** (self.bits - 1)).float()


def _modules(store: Store, kind: str) -> list[str]:
    """Names of the matrices that have a part of that kind."""
    return [name.removesuffix(kind) + CODES for name in store.infos if name.endswith("." + kind)]


def _beside(name: str, kind: str, store: Store) -> TensorInfo:
    part = name.removesuffix(CODES) + kind
    if part not in store.infos:
        raise SurgeryError(f"{part}: missing from the checkpoint, whose config says how it is quantised")
    return store.infos[part]


def _by_block(name: str, store: Store, block: tuple[int, int]) -> Scaled:
    info, scale = _beside(name, CODES, store), _beside(name, INVERSE, store)
    wanted = tuple(-(-size // of) for size, of in zip(info.shape, block, strict=False))
    if info.dtype != torch.float8_e4m3fn or len(info.shape) != 2 or scale.shape != wanted:
        raise _misfit(name, info, scale)
    inverse = name.removesuffix(CODES) + INVERSE
    return Scaled(name, inverse, info.shape, block, wanted, torch.bfloat16, "fp8")


def _packed(name: str, store: Store, bits: int, dtype: torch.dtype) -> Scaled:
    words, scale, shape = (_beside(name, kind, store) for kind in (PACKED, SCALE, SHAPE))
    raw = torch.empty(shape.nbytes, dtype=torch.uint8)
    store.read(name.removesuffix(CODES) + SHAPE, [(0, shape.nbytes)], raw)
    size = tuple(raw.view(shape.dtype).tolist())
    if len(size) != 2 or words.dtype != torch.int32 or words.shape != (size[0], -(-size[1] * bits // 32)):
        raise SurgeryError(f"{name}: {describe(words)} does not hold {list(size)} numbers of {bits} bits")
    module = name.removesuffix(CODES)
    block, scales = _scales(name, words, size, scale)
    parts = {"codes": module + PACKED, "scale": module + SCALE, "others": (module + SHAPE,)}
    return Scaled(**parts, shape=size, block=block, scales=scales, dtype=dtype, kind=f"int{bits}", bits=bits)


def _plain(name: str, store: Store, dtype: torch.dtype) -> Scaled:
    info, scale = _beside(name, CODES, store), _beside(name, SCALE, store)
    if info.dtype not in (torch.int8, torch.float8_e4m3fn) or len(info.shape) != 2:
        raise _misfit(name, info, scale)
    kind = "int8" if info.dtype == torch.int8 else "fp8"
    block, scales = _scales(name, info, info.shape, scale)
    return Scaled(name, name.removesuffix(CODES) + SCALE, info.shape, block, scales, dtype, kind)


def _scales(
    name: str, codes: TensorInfo, shape: tuple[int, ...], scale: TensorInfo
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The block of a scale, and how many scales there are: for all, for each row, or for a group in a row."""
    rows, columns = (1, 1) if len(scale.shape) < 2 else scale.shape
    fits = len(scale.shape) == 2 or scale.nbytes == scale.dtype.itemsize
    if not fits or rows not in (1, shape[0]) or shape[1] % columns or not scale.dtype.is_floating_point:
        raise _misfit(name, codes, scale)
    return (shape[0] // rows, shape[1] // columns), (rows, columns)


def _misfit(name: str, codes: TensorInfo, scale: TensorInfo) -> SurgeryError:
    return SurgeryError(f"{name}: {describe(codes)} does not fit its scales, {describe(scale)}")


def _complete(matrices: dict[str, Scaled], store: Store) -> dict[str, Matrix]:
    """The same, once it is sure that nothing is left of a format that was not understood."""
    parts = {part for matrix in matrices.values() for part in matrix.parts}
    for name, info in store.infos.items():
        if name.endswith(UNKNOWN):
            raise SurgeryError(f"{name}: codes that need it are not read; dequantise the checkpoint first")
        if name not in parts and info.dtype.itemsize == 1 and info.dtype.is_floating_point:
            raise SurgeryError(f"{name}: {describe(info)} without scales")
    return dict(matrices)


def _block(said: dict[str, Any]) -> tuple[int, int] | None:
    block = said.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        return None
    return block[0], block[1]


def _check_compressed(said: dict[str, Any]) -> None:
    """Refuses what compressed-tensors may say besides of how numbers are stored, or how the model is to be changed.

    Raises:
        SurgeryError: names it.
    """
    groups = said.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    found = {str(each.get("format")) for each in (said, *groups) if isinstance(each, dict) and each.get("format")}
    sparsity = said.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        found.add("sparse weights")
    if said.get("transform_config"):
        found.add("rotated weights (transform_config)")
    if unknown := sorted(found - FORMATS):
        raise SurgeryError(f"config.json: compressed-tensors, {unknown[0]}: not read; dequantise the checkpoint first")


def _bits(said: dict[str, Any]) -> int:
    """Of packed weights, one number for all groups of modules.

    Raises:
        SurgeryError: it says several, or others than are read.
    """
    groups = said.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    found = {weight.get("num_bits") for weight in weights if isinstance(weight, dict)}
    if len(found) != 1 or not found <= set(PACKED_BITS):
        known = " or ".join(map(str, PACKED_BITS))
        raise SurgeryError(f"config.json: compressed-tensors of {sorted(map(str, found))} bits, {known} are read")
    return found.pop()
