"""bitsandbytes format: 4 bits with a lookup table, and int8 with a scale per row.

- 4 bits, nf4 or fp4: ``X.weight`` in uint8, row-major, two codes per byte with the first in the upper half;
  ``X.weight.quant_map`` the lookup table; ``X.weight.absmax`` a scale per block; metadata as JSON in
  ``X.weight.quant_state.bitsandbytes__nf4``. Double quantization: the scales are codes of a table of 256 values, times
  ``nested_absmax`` per block of scales, plus ``nested_offset``. Dettmers et al., arXiv:2305.14314.
- int8: ``X.weight`` in int8, ``X.SCB`` the absolute maximum per row. Dettmers et al., arXiv:2208.07339.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.dequantized_store import Matrix, ReadRows
from surgery.checkpoint.quantized.parts import WEIGHT, Quantization, misfit, modules, required_info
from surgery.checkpoint.stores import Store
from surgery.common.errors import SurgeryError

KINDS = ("nf4", "fp4")
STATE = "weight.quant_state.bitsandbytes__"
FACTORS, TABLE = "weight.absmax", "weight.quant_map"
NESTED_FACTORS, NESTED_TABLE = "weight.nested_absmax", "weight.nested_quant_map"
LARGEST, FORMAT = "SCB", "weight_format"
MAX_STATE_BYTES = 1 << 16


def bitsandbytes(entry: dict[str, Any], store: Store, dtype: torch.dtype) -> Quantization:
    """Read the format in which transformers saves bitsandbytes models.

    Raises SurgeryError: tensors of a matrix do not match.
    """
    matrices: dict[str, Matrix] = {}
    for kind in KINDS:
        matrices |= {each: _table_matrix(each, kind, store, dtype) for each in modules(store, STATE + kind)}
    matrices |= {each: _row_matrix(each, store, dtype) for each in modules(store, LARGEST)}
    name = " and ".join(sorted({matrix.kind for matrix in matrices.values()}))
    return Quantization(name, {module + WEIGHT: matrix for module, matrix in matrices.items()})


@dataclass(frozen=True)
class ByTable:
    """Matrix of 4-bit codes with a lookup table; ``block`` elements share a scale, ``nested_block`` scales another."""

    module: str
    shape: tuple[int, int]
    block: int
    nested_block: int | None
    offset: float
    dtype: torch.dtype
    kind: str

    @property
    def parts(self) -> tuple[str, ...]:
        nested = (NESTED_FACTORS, NESTED_TABLE) if self.nested_block else ()
        return tuple(self.module + part for part in (WEIGHT, FACTORS, TABLE, *nested, STATE + self.kind))

    def rows(self, read: ReadRows, first: int, after: int) -> Tensor:
        """Dequantize rows [first, after) to float32 [after - first, columns]."""
        columns = self.shape[1]
        start, stop = first * columns, after * columns
        packed = read(self.module + WEIGHT, start // 2, -(-stop // 2)).flatten()
        codes = torch.stack([packed >> 4, packed & 15], dim=1).flatten()[start % 2 :][: stop - start]
        numbers = read(self.module + TABLE, 0, 16).float()[codes.int()]
        low = start // self.block
        factors = self._factors(read, low, -(-stop // self.block))
        return (numbers * factors[torch.arange(start, stop) // self.block - low]).view(after - first, columns)

    def _factors(self, read: ReadRows, first: int, after: int) -> Tensor:
        stored = read(self.module + FACTORS, first, after)
        if self.nested_block is None:
            return stored.float()
        low = first // self.nested_block
        nested = read(self.module + NESTED_FACTORS, low, -(-after // self.nested_block)).float()
        table = read(self.module + NESTED_TABLE, 0, 256).float()
        return table[stored.int()] * nested[torch.arange(first, after) // self.nested_block - low] + self.offset


@dataclass(frozen=True)
class ByRow:
    """Matrix in int8 with a scale per row: the row's absolute maximum / 127."""

    module: str
    shape: tuple[int, int]
    others: tuple[str, ...]
    dtype: torch.dtype
    kind: str = "int8"

    @property
    def parts(self) -> tuple[str, ...]:
        return self.module + WEIGHT, self.module + LARGEST, *self.others

    def rows(self, read: ReadRows, first: int, after: int) -> Tensor:
        """Dequantize rows [first, after) to float32 [after - first, columns]."""
        largest = read(self.module + LARGEST, first, after).float()
        return read(self.module + WEIGHT, first, after).float() * (largest / 127)[:, None]


def _table_matrix(module: str, kind: str, store: Store, dtype: torch.dtype) -> ByTable:
    state, shape, block, nested_block = _state(module, kind, store)
    codes, factors, table = (required_info(module, part, store) for part in (WEIGHT, FACTORS, TABLE))
    numbers = shape[0] * shape[1]
    blocks = -(-numbers // block)
    fits = codes.dtype == torch.uint8 and codes.shape == (-(-numbers // 2), 1) and table.shape == (16,)
    fits = fits and factors.shape == (blocks,) and (factors.dtype == torch.uint8) == (nested_block is not None)
    if nested_block is not None:
        nested, nested_table = (required_info(module, part, store) for part in (NESTED_FACTORS, NESTED_TABLE))
        fits = fits and nested.shape == (-(-blocks // nested_block),) and nested_table.shape == (256,)
    if not fits:
        raise misfit(module + WEIGHT, codes, factors)
    return ByTable(module, shape, block, nested_block, float(state.get("nested_offset", 0.0)), dtype, kind)


def _state(module: str, kind: str, store: Store) -> tuple[dict[str, Any], tuple[int, int], int, int | None]:
    """Read the JSON state; return it with the matrix's shape, elements per block and scales per nested block."""
    name, info = module + STATE + kind, required_info(module, STATE + kind, store)
    raw = torch.empty(min(info.nbytes, MAX_STATE_BYTES), dtype=torch.uint8)
    store.read(name, [(0, len(raw))], raw)
    try:
        state = json.loads(bytes(raw.tolist()))
        rows, columns = (int(size) for size in state["shape"])
        block, nested = int(state["blocksize"]), state.get("nested_blocksize")
        nested = None if nested is None else int(nested)
        offset = float(state.get("nested_offset", 0.0))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise SurgeryError(f"{name}: no valid quantization state of {module}{WEIGHT} ({error})") from None
    if min(rows, columns, block, 1 if nested is None else nested) < 1 or offset != offset:
        raise SurgeryError(f"{name}: shape {rows} x {columns} with blocks of {block} is not valid")
    return state, (rows, columns), block, nested


def _row_matrix(module: str, store: Store, dtype: torch.dtype) -> ByRow:
    codes, largest = required_info(module, WEIGHT, store), required_info(module, LARGEST, store)
    if codes.dtype != torch.int8 or len(codes.shape) != 2 or largest.shape != codes.shape[:1] or not codes.nbytes:
        raise misfit(module + WEIGHT, codes, largest)
    others = (module + FORMAT,) if module + FORMAT in store.infos else ()
    return ByRow(module, codes.shape, others, dtype)
