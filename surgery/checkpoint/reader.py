"""Reads a checkpoint tensor by tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgery.checkpoint.cast_store import CastStore, config_in
from surgery.checkpoint.config_file import RUN_CHOICES, read_config, without_keys
from surgery.checkpoint.dequantized_store import DequantizedStore
from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.file_kinds import Kind, kind_of
from surgery.checkpoint.gguf_folder import open_gguf, temporary_folder
from surgery.checkpoint.gguf_store import GgufStore
from surgery.checkpoint.layout import (
    CONFIG,
    PICKLE_INDEX,
    WEIGHTS_INDEX,
    FolderFiles,
    check_index,
    check_links,
    find_sidecars,
    find_weights,
    stamp_of,
)
from surgery.checkpoint.location import find_gguf, locate
from surgery.checkpoint.quantized import is_quantized, quantization_of
from surgery.checkpoint.read_ahead import ReadAhead
from surgery.checkpoint.row_slices import RowSliceStore
from surgery.checkpoint.stores import PickleStore, SafetensorsStore, Store
from surgery.checkpoint.tensors import CHUNK_BYTES, TensorInfo, as_bytes, describe
from surgery.common.errors import SurgeryError


class Identity(NamedTuple):
    """Fingerprint of a checkpoint as plain values, and the stamp that its files had before it was taken."""

    sha256: str
    stamp: dict[str, list[int]]


class CheckpointReader:
    """A checkpoint's config, tensors and sidecar files; made by `open`, which finds every fault of the files.

    Each call holds no more than the tensor it returns, and no safetensors file stays open or mapped after it. Of
    pickled weights the last shard read stays mapped. Tensors of a GGUF file, and of formats that
    :mod:`surgery.checkpoint.quantized` knows, are dequantized as they are read.

    Attributes:
        path: the local folder with config.json and tokenizer; of a GGUF file, and of quantized weights, a temporary
            one that stands in for it.
        source: what `open` takes again, in any process: the folder, or the GGUF file.
        config: config.json, parsed, without what chooses the code that runs the model or belongs to no tensor here.
        stored_names: of tensors that stand for stored ones under other names, and are written back under those.
        left_out: stored tensors that this is a view without.
        dequantised_from: what quantized weights are stored in, of a GGUF file most of them, such as Q4_1; None for
            weights that are read as they are stored.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        store: Store,
        files: FolderFiles,
        *,
        source: Path | None = None,
        dequantised_from: str | None = None,
        behind: CheckpointReader | None = None,
        stamp: dict[str, list[int]] | None = None,
    ):
        self.path = path
        self.source = source or path
        self.config = config
        self.dequantised_from = dequantised_from
        self._store = store
        self._files = files
        self._behind = behind
        self._stamp = stamp
        self._ahead = ReadAhead()
        self._identity: Identity | None = None
        self._hashed_config = config
        self.stored_names: dict[str, str] = {}
        self.left_out: tuple[str, ...] = ()

    @classmethod
    def open(cls, source: str | Path, *, revision: str | None = None, allow_pickle: bool = False) -> CheckpointReader:
        """Opens a local folder, a GGUF file or, where there is nothing of that name, a hub model such as ``org/name``.

        Reads the config, the index and the shards' headers, and no weights.

        Args:
            source: the folder, the GGUF file or a folder of one, or the hub model's id.
            revision: the hub's branch, tag or commit.
            allow_pickle: accept pytorch_model.bin where there is no safetensors file.

        Raises:
            SurgeryError: there is no such checkpoint, or it is incomplete, damaged or contradictory.
        """
        with disk_errors(Path(source)):
            path = locate(source, revision=revision, allow_pickle=allow_pickle)
            if files := find_gguf(path):
                return cls._of_gguf(path, files)
            stamp = stamp_of(path)  # before anything is read, so that whatever changes later shows
            check_links(path, [path / CONFIG])
            config = read_config(path / CONFIG)
            weights = find_weights(path, allow_pickle=allow_pickle)
            store = PickleStore(path, weights.files) if weights.pickled else SafetensorsStore(path, weights.files)
            check_index(path, weights, store.infos)
            if not store.infos:
                raise SurgeryError.at(path, "its weight files hold no tensors; give a whole checkpoint")
            files = find_sidecars(path, weights.files)
            check_links(path, files.paths)
            return cls(path, config, store, files, stamp=stamp)._cleaned()._dequantized()

    @classmethod
    def _of_gguf(cls, path: Path, files: list[Path]) -> CheckpointReader:
        if len(files) > 1:
            raise SurgeryError.at(path, f"holds {len(files)} GGUF files ({files[0].name}, ...); give one of them")
        if files != [path]:
            check_links(path, files)
        stamp = stamp_of(files[0])
        opened = open_gguf(files[0])
        store = GgufStore(opened.file, opened.model.tensors, opened.model.dtype)
        return cls(
            opened.folder,
            opened.model.config,
            store,
            find_sidecars(opened.folder),
            source=files[0],
            dequantised_from=opened.model.dequantised_from,
            stamp=stamp,
        )

    def seen_as(
        self, config: dict[str, Any], parts: Mapping[str, Mapping[str, int]], *, put_back: bool = False
    ) -> CheckpointReader:
        """Return a view of the same weights with another config, some tensors being rows of stored ones (see
        :class:`RowSliceStore`).

        Its ``path`` is a temporary folder with that config and links to the sidecars, but for remote code, which is
        that of the stored names. With ``put_back`` each part is a whole tensor under another name, and what is made
        of it is written as the stored one.
        """
        view = self._view(config, RowSliceStore(self._store, parts), self.dequantised_from, code=False)
        view.left_out = tuple(stored for stored, names in parts.items() if not names)
        if put_back:
            view.stored_names = {name: stored for stored, names in parts.items() for name in names}
        return view

    def corrected(self, config: dict[str, Any]) -> CheckpointReader:
        """Return the same checkpoint with another config.json; itself if that is equal.

        Its fingerprint is that of the files. Its ``path`` is a temporary folder with that config and links to the rest.
        """
        if config == self.config:
            return self
        view = self._view(config, self._store, self.dequantised_from, code=True)
        view._behind, view._hashed_config = self._behind, self._hashed_config
        view._files, view._stamp = self._files, self._stamp
        if isinstance(self._store, SafetensorsStore | PickleStore):
            files = {info.file for info in self._store.infos.values()}
            files |= {name for name in (WEIGHTS_INDEX, PICKLE_INDEX) if (self.path / name).is_file()}
            with disk_errors(view.path):
                for name in files:
                    (view.path / name).symlink_to((self.path / name).absolute())
        return view

    def _cleaned(self) -> CheckpointReader:
        """A view without what config.json says of code to run, or of a quantization that no stored tensor has."""
        quantized = is_quantized(self._store)
        return self.corrected(without_keys(self.config, RUN_CHOICES + ("quantization_config",) * (not quantized)))

    def _dequantized(self) -> CheckpointReader:
        """A view of quantized weights without quantization; itself, where there are none that can be read."""
        quantization = quantization_of(self.config, self._store)
        if quantization is None:
            return self
        config = {name: value for name, value in self.config.items() if name != "quantization_config"}
        return self._view(config, DequantizedStore(self._store, quantization.matrices), quantization.name, code=True)

    def in_dtype(self, dtype: torch.dtype) -> CheckpointReader:
        """Return the same weights, rounded to a dtype as they are read; itself if they have it."""
        store = CastStore(self._store, dtype)
        if store.infos == self._store.infos:
            return self
        return self._view(config_in(self.config, dtype), store, self.dequantised_from, code=True)

    def _view(
        self, config: dict[str, Any], store: Store, dequantised_from: str | None, *, code: bool
    ) -> CheckpointReader:
        """Return the same checkpoint with another config and tensors; with its remote code, or without."""
        folder = temporary_folder() / self.name
        with disk_errors(folder):
            folder.mkdir()
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            for name in self._files.sidecars:
                if code or kind_of(name) is not Kind.CODE:
                    link = folder / name
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to((self.path / name).absolute())
        files = find_sidecars(folder)
        return CheckpointReader(
            folder, config, store, files, source=self.source, dequantised_from=dequantised_from, behind=self
        )

    @property
    def name(self) -> str:
        """The folder's or the GGUF file's name."""
        return self.source.name if self.source.is_file() else self.source.resolve().name

    @property
    def stored_config(self) -> dict[str, Any]:
        """config.json of the files, where this is a view of them with another."""
        return self.config if self._behind is None else self._behind.config

    @property
    def stored_path(self) -> Path:
        """The folder with that config and the tokenizer."""
        return self.path if self._behind is None else self._behind.path

    @property
    def stored_as(self) -> str | None:
        """The model type of the files, where this is a view of them as another (see :meth:`seen_as`)."""
        kind = None if self._behind is None else self._behind.config.get("model_type")
        return kind if kind != self.config.get("model_type") else None

    @property
    def as_stored(self) -> CheckpointReader:
        """The same checkpoint without dequantization; a GGUF file is always dequantized."""
        return self._behind if isinstance(self._store, DequantizedStore) and self._behind is not None else self

    def stored_parts(self, name: str) -> dict[str, TensorInfo]:
        """Return the parts of a quantized matrix in :attr:`as_stored`; none for tensors that are read as they are
        stored."""
        return self._store.parts(name) if isinstance(self._store, DequantizedStore) else {}

    def model_folder(self) -> Path:
        """A folder that transformers can load: ``path``, or of quantized or cast weights a temporary copy.

        The copy takes 2 bytes a parameter (4 where numbers are float32) in the folder for temporary files, and goes
        when the process ends.

        Raises:
            SurgeryError: the file cannot be read, or the disk is too full.
        """
        if isinstance(self._store, GgufStore | DequantizedStore | CastStore):
            from surgery.checkpoint.dequantized_copy import dequantized_copy

            return dequantized_copy(self)
        return self.path if self._behind is None else self._behind.model_folder()

    def __contains__(self, name: object) -> bool:
        return name in self._store.infos

    def names(self) -> list[str]:
        """All tensors' names: the shards in the order of their file names, in each its own order."""
        return list(self._store.infos)

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape, size in bytes and file of a tensor, without loading it.

        Raises:
            SurgeryError: there is no such tensor.
        """
        try:
            return self._store.infos[name]
        except KeyError:
            raise SurgeryError.at(self.path, f"no tensor {name}; check the model family and the weights") from None

    def tensor(self, name: str) -> Tensor:
        """Loads one tensor onto the CPU in its stored dtype; the caller owns it.

        Raises:
            SurgeryError: there is no such tensor, or the file cannot be read.
        """
        info = self.info(name)
        out = torch.empty(info.nbytes, dtype=torch.uint8)
        self._store.read(name, [(0, info.nbytes)], out)
        return out.view(info.dtype).reshape(info.shape)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Loads the tensors of a module by their full names; ``model.layers.1`` leaves out ``model.layers.10``."""
        return {name: self.tensor(name) for name in self._names_of(prefix)}

    def read_ahead(self, prefix: str) -> None:
        """Prefetch the tensors of a module while this process does something else; return at once."""
        self._ahead.ask(place for name in self._names_of(prefix) for place in self._store.places(name))

    def _names_of(self, prefix: str) -> list[str]:
        module = prefix.rstrip(".") + "." if prefix else ""
        return [name for name in self.names() if name.startswith(module)]

    def rows(self, name: str, index: Tensor) -> Tensor:
        """Rows of a matrix [R, C] as [*index.shape, C]; only they are read, each once.

        Args:
            name: a 2-D tensor.
            index: int64 row numbers of any shape, in any order, repeated or not.

        Raises:
            SurgeryError: there is no such matrix, or a row number is out of range.
        """
        info = self.info(name)
        if len(info.shape) != 2:
            raise SurgeryError.at(self.path, f"{name} is {describe(info)}, not a matrix with rows")
        unique, inverse = torch.unique(index.cpu(), return_inverse=True)
        if len(unique) and not 0 <= int(unique[0]) <= int(unique[-1]) < info.shape[0]:
            bad = int(unique[0] if unique[0] < 0 else unique[-1])
            raise SurgeryError.at(
                self.path, f"row {bad} of {name}, which has {info.shape[0]} rows; does the tokenizer match the model?"
            )
        row_bytes = info.shape[1] * info.dtype.itemsize
        ranges = [(start * row_bytes, stop * row_bytes) for start, stop in _runs(unique)]
        buffer = torch.empty(len(unique), row_bytes, dtype=torch.uint8)
        self._store.read(name, ranges, buffer.reshape(-1))
        # Gathered as bytes, which every release of torch can index, unlike the rarer dtypes.
        rows = buffer if index.ndim == 1 and torch.equal(unique, index.cpu()) else buffer[inverse.reshape(-1)]
        return rows.view(info.dtype).reshape(*index.shape, info.shape[1])

    def chunks(self, name: str) -> Iterator[Tensor]:
        """The values of a tensor in order, flat, in pieces of at most 16 MiB.

        The pieces share their memory: each is good until the next one is asked for.

        Raises:
            SurgeryError: there is no such tensor, or the file cannot be read.
        """
        info = self.info(name)
        # One buffer for all: allocations of this size, freed and made again by several threads, pile up in malloc.
        buffer = torch.empty(min(CHUNK_BYTES, info.nbytes), dtype=torch.uint8)
        for start in range(0, info.nbytes, CHUNK_BYTES):
            piece = buffer[: info.nbytes - start]
            self._store.read(name, [(start, start + len(piece))], piece)
            yield piece.view(info.dtype)

    @property
    def files(self) -> FolderFiles:
        """Files next to weights and config.json in the folder that was opened, or that a GGUF file stands for."""
        return self._files if self._behind is None else self._behind.files

    def sidecars(self) -> list[Path]:
        """Full paths of the files that belong to the checkpoint next to weights and config.json, code among them."""
        return self._files.paths

    def stamp(self) -> dict[str, list[int]]:
        """Size, inode and times of change of the files that loading reads, now (see :func:`stamp_of`)."""
        return self._behind.stamp() if self._behind is not None else stamp_of(self.source)

    def check_untouched(self) -> None:
        """Raises SurgeryError: a file was touched, added or removed since they were opened, and no hash is of it."""
        if self._behind is not None:
            self._behind.check_untouched()
        elif self._stamp != (now := self.stamp()):
            before = self._stamp or {}
            changed = next(name for name in sorted({*before, *now}) if before.get(name) != now.get(name))
            raise SurgeryError(f"{changed}: was changed while it was read; start again")

    def fingerprint(self, progress: Callable[[int], None] | None = None) -> str:
        """SHA-256, in hex, over the config and every tensor's name, dtype, shape and bytes, read once by a reader.

        The same for the same content however it is split into shards.

        Args:
            progress: called after each tensor with the number of its bytes, from the calling thread.

        Raises:
            SurgeryError: a file cannot be read.
        """
        return self.identity(progress).sha256

    def identity(self, progress: Callable[[int], None] | None = None) -> Identity:
        """The fingerprint, and the stamp that the files had when they were opened; arguments are `fingerprint`'s."""
        if self._behind is not None:
            return self._behind.identity(progress)
        if self._identity is None:
            self._identity = Identity(self._hashed(progress), self._stamp or self.stamp())
        return self._identity

    def recall(self, identity: Identity | None) -> bool:
        """Return whether the fingerprint needs no read: known, or from an earlier run of files with this stamp."""
        if self._behind is not None:
            return self._behind.recall(identity)
        if self._identity is None and identity is not None and identity.stamp == self._stamp == self.stamp():
            self._identity = identity
        return self._identity is not None

    def check_unchanged(self) -> None:
        """Raises SurgeryError: config or weights are others than those that the fingerprint was taken of.

        They are read again only where somebody has touched the files.
        """
        identity = self.identity()
        if self.stamp() != identity.stamp:
            now = CheckpointReader.open(self.source, allow_pickle=True)  # the config as it is there now
            if now.fingerprint() != identity.sha256:
                raise SurgeryError(f"{self.source}: was changed while it was read; start again")

    def _hashed(self, progress: Callable[[int], None] | None) -> str:
        names = self.names()
        with ThreadPoolExecutor(self._store.max_readers) as pool:
            digests = {}
            for name, digest in zip(names, pool.map(self._digest, names), strict=True):
                digests[name] = digest
                if progress:
                    progress(self.info(name).nbytes)
        whole = hashlib.sha256(json.dumps(self._hashed_config, sort_keys=True).encode())
        for name in sorted(names):
            whole.update(f"\n{json.dumps(name)} {describe(self.info(name))} {digests[name]}".encode())
        return whole.hexdigest()

    def _digest(self, name: str) -> str:
        digest = hashlib.sha256()
        for piece in self.chunks(name):
            digest.update(as_bytes(piece).numpy())
        return digest.hexdigest()


def _runs(rows: Tensor) -> list[tuple[int, int]]:
    """Ascending row numbers as ranges [start, stop) of neighbors: 1 2 3 7 gives (1, 4), (7, 8)."""
    if not len(rows):
        return []
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), len(rows)]
    return [(int(rows[start]), int(rows[stop - 1]) + 1) for start, stop in zip(starts, stops, strict=True)]
