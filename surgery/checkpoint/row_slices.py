"""Fused tensors of a checkpoint, such as QKV projections, read as separate tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surgery.checkpoint.stores import ByteRanges, Store
from surgery.checkpoint.tensors import TensorInfo, as_bytes
from surgery.common.errors import SurgeryError
from surgery.common.rows import Rows


@dataclass(frozen=True)
class _Slice:
    stored: str
    rows: Rows


class RowSliceStore:
    """Store that exposes rows of stored tensors as separate tensors.

    ``parts`` has, by stored tensor, the names that replace it, each with its rows, or with the number of rows that
    follow the part before. A tensor with no parts is left out. Raises SurgeryError: the rows do not add up.
    """

    def __init__(self, store: Store, parts: Mapping[str, Mapping[str, int | Rows]]):
        self._store, self.max_readers = store, store.max_readers
        self._slices: dict[str, _Slice] = {}
        self.infos = {}
        for stored, info in store.infos.items():
            if stored in parts:
                self._add(stored, info, parts[stored])
            else:
                self.infos[stored] = info

    def _add(self, stored: str, info: TensorInfo, parts: Mapping[str, int | Rows]) -> None:
        slices, first = {}, 0
        for name, rows in parts.items():
            slices[name] = Rows(((first, first + rows),)) if isinstance(rows, int) else rows
            first += slices[name].count
        for name, rows in slices.items():
            count, *rest = reversed(info.shape) if rows.transposed else info.shape
            if first != count:
                raise SurgeryError(f"{stored} has {count} rows, but the config requires {first}")
            self._slices[name] = _Slice(stored, rows)
            self.infos[name] = replace(info, shape=(rows.count, *rest), nbytes=info.nbytes // count * rows.count)

    def read(self, name: str, ranges: ByteRanges, out: Tensor) -> None:
        """Read as :meth:`Store.read` does."""
        if name not in self._slices:
            self._store.read(name, ranges, out)
            return
        part = self._slices[name]
        row = self.infos[name].nbytes // part.rows.count
        if part.rows.transposed:
            flat = as_bytes(torch.cat([self._transposed(part.stored)[slice(*run)] for run in part.rows.runs]))
            selected = torch.cat([flat[start:stop] for start, stop in ranges])
            out[: len(selected)] = selected
        else:
            self._store.read(part.stored, list(_stored_ranges(part.rows, row, ranges)), out)

    def _transposed(self, stored: str) -> Tensor:
        info = self._store.infos[stored]
        buffer = torch.empty(info.nbytes, dtype=torch.uint8)
        self._store.read(stored, [(0, info.nbytes)], buffer)
        return buffer.view(info.dtype).reshape(info.shape).T


def _stored_ranges(rows: Rows, row: int, ranges: ByteRanges) -> Iterator[tuple[int, int]]:
    """Map byte ranges [start, stop) of the selected rows, each of ``row`` bytes, to ranges of the stored tensor."""
    for start, stop in ranges:
        before = 0
        for first, last in rows.runs:
            begin, end = max(start - before, 0), min(stop - before, (last - first) * row)
            if begin < end:
                yield first * row + begin, first * row + end
            before += (last - first) * row
