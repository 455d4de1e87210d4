"""Stores of tensors' bytes: safetensors files or, on request, pickled state dicts.

A store has ``infos``, every tensor by name in the files' order, and ``read``, which copies ranges of a tensor's bytes.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from surgery.checkpoint.disk import disk_errors, read_exactly
from surgery.checkpoint.read_ahead import Place
from surgery.checkpoint.safetensors_format import read_header
from surgery.checkpoint.tensors import CHUNK_BYTES, NAME_OF_DTYPE, TensorInfo, as_bytes, describe
from surgery.common.errors import SurgeryError

ByteRanges = Sequence[tuple[int, int]]


class Store(Protocol):
    """Tensors by name, and their bytes; ``max_readers`` is how many threads may usefully read at once."""

    max_readers: int
    infos: dict[str, TensorInfo]

    def read(self, name: str, ranges: ByteRanges, out: Tensor) -> None:
        """Fills ``out``, uint8, with the bytes [start, stop) of a tensor for each of ``ranges``, in turn."""
        ...

    def places(self, name: str) -> list[Place]:
        """Return the byte ranges that a tensor is read from; none where prefetching does not help."""
        ...


def read_rows(ranges: ByteRanges, columns: int, itemsize: int, rows: Callable[[int, int], Tensor], out: Tensor) -> None:
    """Read ranges of a matrix like :meth:`Store.read`, from ``rows`` [first, after), a chunk of float32 at a time."""
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
    """Reads plainly from files. Memory maps would stay resident, and a conversion would grow to the model's size."""

    max_readers = 4  # each hashes about as fast as a disk reads

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
                    raise SurgeryError.at(path, f"became shorter while it was read ({name}); start again")
                view = view[stop - start :]

    def places(self, name: str) -> list[Place]:
        return [Place(self._folder / self.infos[name].file, self._offsets[name], self.infos[name].nbytes)]


class PickleStore:
    """Reads ``torch.save`` files with ``weights_only``, one shard in (mapped) memory at a time."""

    max_readers = 1  # several could need several shards at once

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

    def places(self, name: str) -> list[Place]:
        return []

    def _shard(self, file: str) -> dict[str, Tensor]:
        loaded, state = self._loaded
        if loaded != file:
            self._loaded = ("", {})  # frees the previous shard before the next one is loaded
            state = _load_pickle(self._folder / file)
            self._loaded = (file, state)
        return state


def _load_pickle(path: Path) -> dict[str, Tensor]:
    """The state dict in a ``torch.save`` file; SurgeryError where it is anything else."""
    try:
        # Files of before torch 1.6 are no zip archives and cannot be mapped; they are loaded whole.
        archived = zipfile.is_zipfile(path)
        if archived:
            _check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=archived)
    except SurgeryError:
        raise
    except Exception as error:  # a damaged or hostile pickle can raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # What torch says before it names the code in there is how to have it run.
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
                path, f"{name} ({describe(tensor)}) has more numbers than are stored; save a whole copy"
            )
    return {name: tensor.detach() for name, tensor in state.items()}


def _check_archive(path: Path) -> None:
    """Refuses what may become more bytes than the file has: torch.save stores plainly, and everything once."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not plain or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise SurgeryError.at(path, "a compressed archive, which torch.save does not write; save it again")


def _add(infos: dict[str, TensorInfo], name: str, info: TensorInfo, folder: Path) -> None:
    if name in infos:
        raise SurgeryError.at(folder, f"{name} is in both {infos[name].file} and {info.file}; remove the stale file")
    infos[name] = info
