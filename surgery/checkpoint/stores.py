"""Stores of tensor bytes: safetensors files or, if allowed, pickled state dicts.

A store has ``infos``, the infos of all tensors in the order of the files, and ``read``, which copies byte ranges.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from surgery.checkpoint.disk import disk_errors, read_exactly
from surgery.checkpoint.read_ahead import FileRange
from surgery.checkpoint.safetensors_format import read_header
from surgery.checkpoint.tensors import CHUNK_BYTES, NAME_OF_DTYPE, TensorInfo, as_bytes, describe
from surgery.common.errors import SurgeryError

ByteRanges = Sequence[tuple[int, int]]


class Store(Protocol):
    """Tensor infos by name and access to the bytes; ``max_readers`` is the useful number of concurrent readers."""

    max_readers: int
    infos: dict[str, TensorInfo]

    def read(self, name: str, ranges: ByteRanges, out: Tensor) -> None:
        """Fill ``out`` (uint8) with consecutive byte ranges [start, stop) of a tensor."""
        ...

    def file_ranges(self, name: str) -> list[FileRange]:
        """Return the file ranges of a tensor, for prefetching; empty if prefetching does not help."""
        ...


def read_rows(ranges: ByteRanges, columns: int, itemsize: int, rows: Callable[[int, int], Tensor], out: Tensor) -> None:
    """Implement :meth:`Store.read` with a function that returns rows [first, after), in float32 chunks of 16 MiB."""
    row_bytes, step = columns * itemsize, max(1, CHUNK_BYTES // (4 * columns))
    for start, stop in ranges:
        last = -(-stop // row_bytes)
        for first in range(start // row_bytes, last, step):
            after = min(first + step, last)
            begin, end = max(0, start - first * row_bytes), min(stop, after * row_bytes) - first * row_bytes
            chunk = as_bytes(rows(first, after))[begin:end]
            out[: len(chunk)] = chunk
            out = out[len(chunk) :]


class SafetensorsStore:
    """Store of safetensors files, read without memory maps, whose pages would stay resident up to the model's size."""

    max_readers = 4  # one thread hashes about as fast as a disk reads

    def __init__(self, folder: Path, files: Sequence[str]):
        self._folder = folder
        self._offsets: dict[str, int] = {}
        self.infos: dict[str, TensorInfo] = {}
        for file in files:
            for name, (info, offset) in read_header(folder, file).items():
                _add(self.infos, name, info, folder)
                self._offsets[name] = offset

    def read(self, name: str, ranges: ByteRanges, out: Tensor) -> None:
        path = self._folder / self.infos[name].file
        view = memoryview(out.numpy())
        with disk_errors(path), open(path, "rb", buffering=0) as file:
            for start, stop in ranges:
                file.seek(self._offsets[name] + start)
                if not read_exactly(file, view[: stop - start]):
                    raise SurgeryError.at(path, f"was truncated while it was read ({name}); start again")
                view = view[stop - start :]

    def file_ranges(self, name: str) -> list[FileRange]:
        return [FileRange(self._folder / self.infos[name].file, self._offsets[name], self.infos[name].nbytes)]


class PickleStore:
    """Store of ``torch.save`` files, loaded with ``weights_only``, one memory-mapped shard at a time."""

    max_readers = 1  # several readers could need several shards in memory

    def __init__(self, folder: Path, files: Sequence[str]):
        self._folder = folder
        self._loaded: tuple[str, dict[str, Tensor]] = ("", {})
        self.infos: dict[str, TensorInfo] = {}
        for file in files:
            for name, tensor in self._shard(file).items():
                info = TensorInfo(tensor.dtype, tuple(tensor.shape), tensor.numel() * tensor.dtype.itemsize, file)
                _add(self.infos, name, info, folder)

    def read(self, name: str, ranges: ByteRanges, out: Tensor) -> None:
        flat = as_bytes(self._shard(self.infos[name].file)[name].contiguous())
        for start, stop in ranges:
            out[: stop - start] = flat[start:stop]
            out = out[stop - start :]

    def file_ranges(self, name: str) -> list[FileRange]:
        return []

    def _shard(self, file: str) -> dict[str, Tensor]:
        loaded, state = self._loaded
        if loaded != file:
            self._loaded = ("", {})  # free the previous shard before loading the next
            state = _load_pickle(self._folder / file)
            self._loaded = (file, state)
        return state


def _load_pickle(path: Path) -> dict[str, Tensor]:
    """Load the state dict in a ``torch.save`` file; raise SurgeryError for any other content."""
    try:
        # Files from before torch 1.6 are not zip archives and cannot be mapped.
        archived = zipfile.is_zipfile(path)
        if archived:
            _check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=archived)
    except SurgeryError:
        raise
    except Exception as error:  # a damaged or hostile pickle can raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # Skip torch's advice on how to execute the pickled code.
        reason = next((line for line in lines if "GLOBAL" in line), lines[0]).rpartition("error: ")[2].strip()
        raise SurgeryError.at(path, f"torch.load(weights_only=True) refuses it: {reason}") from error
    if not isinstance(state, dict):
        raise SurgeryError.at(
            path, f"holds a {type(state).__name__}, not a dict of tensors; save its state_dict instead"
        )
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise SurgeryError.at(
                path, f"{name!r} is a {type(tensor).__name__}, not a tensor; save the state_dict alone"
            )
        if tensor.dtype not in NAME_OF_DTYPE or tensor.layout != torch.strided or tensor.is_meta:
            raise SurgeryError.at(path, f"{name} ({describe(tensor)}, {tensor.layout}) cannot be stored as safetensors")
        if tensor.numel() * tensor.dtype.itemsize > tensor.untyped_storage().nbytes():
            raise SurgeryError.at(
                path, f"{name} ({describe(tensor)}) has more elements than its storage; save a contiguous copy"
            )
    return {name: tensor.detach() for name, tensor in state.items()}


def _check_archive(path: Path) -> None:
    """Refuse archives that unpack to more bytes than the file: torch.save stores uncompressed and without overlaps."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not plain or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise SurgeryError.at(path, "is a compressed archive, which torch.save does not write; save it again")


def _add(infos: dict[str, TensorInfo], name: str, info: TensorInfo, folder: Path) -> None:
    if name in infos:
        raise SurgeryError.at(folder, f"{name} is in both {infos[name].file} and {info.file}; remove the stale file")
    infos[name] = info
