"""Tensors that a checkpoint stores as one, such as queries, keys and values, read by a name for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from surgery.checkpoint.stores import ByteRanges, Store
from surgery.common.errors import SurgeryError


@dataclass(frozen=True)
class _Slice:
    """Bytes of a stored tensor, from ``start``."""

    stored: str
    start: int


class RowSliceStore:
    """A store in which some tensors are rows of others.

    Args:
        store: what the tensors are stored in.
        parts: of a stored tensor, the names that stand in its place and how many rows each has, in their order.
    """

    def __init__(self, store: Store, parts: Mapping[str, Mapping[str, int]]):
        self._store, self.max_readers = store, store.max_readers
        self._slices: dict[str, _Slice] = {}
        self.infos = {}
        for stored, info in store.infos.items():
            wanted = parts.get(stored, {stored: info.shape[0] if info.shape else 0})
            if stored in parts and sum(wanted.values()) != info.shape[0]:
                raise SurgeryError(f"{stored}: {info.shape[0]} rows do not fit the config, wanted {dict(wanted)}")
            start = 0
            for name, rows in wanted.items():
                if stored not in parts:
                    self.infos[name] = info
                else:
                    nbytes = info.nbytes // info.shape[0] * rows
                    self.infos[name] = replace(info, shape=(rows, *info.shape[1:]), nbytes=nbytes)
                self._slices[name] = _Slice(stored, start)
                start += self.infos[name].nbytes

    def read(self, name: str, ranges: ByteRanges, out: Tensor) -> None:
        """As :meth:`Store.read`."""
        where = self._slices[name]
        self._store.read(where.stored, [(where.start + start, where.start + stop) for start, stop in ranges], out)
