"""Lazy reader of a checkpoint's tensors."""

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
    WEIGHTS_INDEX,
    FolderFiles,
    check_index,
    find_sidecars,
    find_weights,
    stamp_of,
)
from surgery.checkpoint.location import find_gguf, locate
from surgery.checkpoint.quantized import is_quantized, quantized_matrices
from surgery.checkpoint.row_slices import RowSliceStore
from surgery.checkpoint.stores import SafetensorsStore, Store
from surgery.checkpoint.tensors import CHUNK_BYTES, TensorInfo, as_bytes, describe
from surgery.common.errors import SurgeryError


class Identity(NamedTuple):
    """Fingerprint of a checkpoint, and the stamp of its files before hashing, as plain values."""

    sha256: str
    stamp: dict[str, list[int]]


class CheckpointReader:
    """Config, tensors and sidecar files of a checkpoint; created by `open`, which validates all files.

    Each call holds at most the tensor that it returns. Files are not kept open or mapped. GGUF tensors and those of
    :mod:`surgery.checkpoint.quantized` are dequantized while reading.

    Attributes:
        path: local folder with config.json and tokenizer; a temporary folder for GGUF files and quantized weights.
        source: folder or GGUF file that `open` accepts in any process.
        config: parsed config.json, without keys that select code or describe a quantization that is absent.
        stored_names: stored name by name in this view, for renamed tensors; outputs are written under stored names.
        left_out: stored tensors that this view omits.
        underlying: reader whose view this is; None for a view of files.
        dequantised_from: quantization format of the weights (in GGUF, of most elements), such as Q4_1; None if the
            weights are not quantized.
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
        underlying: CheckpointReader | None = None,
        stamp: dict[str, list[int]] | None = None,
    ):
        self.path = path
        self.source = source or path
        self.config = config
        self.dequantised_from = dequantised_from
        self._store = store
        self._files = files
        self.underlying = underlying
        self._stamp = stamp
        self._identity: Identity | None = None
        self._hashed_config = config
        self.stored_names: dict[str, str] = {}
        self.left_out: tuple[str, ...] = ()

    @classmethod
    def open(cls, source: str | Path) -> CheckpointReader:
        """Open a local folder, a GGUF file or, if no such path exists, a hub model such as ``org/name``.

        Reads the config, the index and the shards' headers, but no weights.

        Args:
            source: the folder, the GGUF file, a folder with one GGUF file, or the hub id.

        Raises:
            SurgeryError: there is no such checkpoint, or it is incomplete, damaged or contradictory.
        """
        with disk_errors(Path(source)):
            path = locate(source)
            if files := find_gguf(path):
                return cls._of_gguf(path, files)
            stamp = stamp_of(path)  # before reading, so that later changes are detected
            config = read_config(path / CONFIG)
            weights = find_weights(path)
            store = SafetensorsStore(path, weights.files)
            check_index(path, weights, store.infos)
            if not store.infos:
                raise SurgeryError.at(path, "its weight files contain no tensors; use a complete checkpoint")
            files = find_sidecars(path, weights.files)
            return cls(path, config, store, files, stamp=stamp)._cleaned()._dequantized()

    @classmethod
    def _of_gguf(cls, path: Path, files: list[Path]) -> CheckpointReader:
        if len(files) > 1:
            raise SurgeryError.at(path, f"contains {len(files)} GGUF files ({files[0].name}, ...); pass one of them")
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
        """Return a view of the weights with another config, in which parts of stored tensors are separate tensors.

        See :class:`RowSliceStore` for ``parts``. The view's ``path`` is a temporary folder with the new config and
        links to the sidecars except remote code, which belongs to the stored names. With ``put_back`` each part must be
        a whole tensor under a new name, and outputs are written under the stored name.
        """
        view = self._view(config, RowSliceStore(self._store, parts), self.dequantised_from, code=False)
        view.left_out = tuple(stored for stored, names in parts.items() if not names)
        if put_back:
            view.stored_names = {name: stored for stored, names in parts.items() for name in names}
        return view

    def corrected(self, config: dict[str, Any]) -> CheckpointReader:
        """Return a view of the checkpoint with another config.json; the reader itself if the config is equal.

        The fingerprint remains that of the files. ``path`` is a temporary folder with the new config and links to all
        other files.
        """
        if config == self.config:
            return self
        view = self._view(config, self._store, self.dequantised_from, code=True)
        view.underlying, view._hashed_config = self.underlying, self._hashed_config
        view._files, view._stamp = self._files, self._stamp
        if isinstance(self._store, SafetensorsStore):
            files = {info.file for info in self._store.infos.values()}
            files |= {WEIGHTS_INDEX} if (self.path / WEIGHTS_INDEX).is_file() else set()
            with disk_errors(view.path):
                for name in files:
                    (view.path / name).symlink_to((self.path / name).absolute())
        return view

    def _cleaned(self) -> CheckpointReader:
        """Drop config keys that select code, and a quantization config if no stored tensor is quantized."""
        quantized = is_quantized(self._store)
        return self.corrected(without_keys(self.config, RUN_CHOICES + ("quantization_config",) * (not quantized)))

    def _dequantized(self) -> CheckpointReader:
        """Return a dequantized view of quantized weights; the reader itself if there is no supported quantization."""
        matrices = quantized_matrices(self.config, self._store, self.path)
        if not matrices:
            return self
        config = {name: value for name, value in self.config.items() if name != "quantization_config"}
        kinds = " and ".join(sorted({matrix.kind for matrix in matrices.values()}))
        return self._view(config, DequantizedStore(self._store, matrices), kinds, code=True)

    def in_dtype(self, dtype: torch.dtype) -> CheckpointReader:
        """Return a view that casts the weights to a dtype while reading; the reader itself if they have this dtype."""
        store = CastStore(self._store, dtype)
        if store.infos == self._store.infos:
            return self
        return self._view(config_in(self.config, dtype), store, self.dequantised_from, code=True)

    def _view(
        self, config: dict[str, Any], store: Store, dequantised_from: str | None, *, code: bool
    ) -> CheckpointReader:
        """Create a reader with another config and store, and a temporary folder with links to the sidecars."""
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
            folder, config, store, files, source=self.source, dequantised_from=dequantised_from, underlying=self
        )

    @property
    def name(self) -> str:
        """Name of the folder or GGUF file."""
        return self.source.name if self.source.is_file() else self.source.resolve().name

    @property
    def stored_config(self) -> dict[str, Any]:
        """config.json of the stored checkpoint, if this reader is a view with another config."""
        return self.config if self.underlying is None else self.underlying.config

    @property
    def stored_path(self) -> Path:
        """Folder with the stored config and the tokenizer."""
        return self.path if self.underlying is None else self.underlying.path

    @property
    def stored_as(self) -> str | None:
        """Model type of the stored checkpoint if it differs from this view's (see :meth:`seen_as`), else None."""
        kind = None if self.underlying is None else self.underlying.config.get("model_type")
        return kind if kind != self.config.get("model_type") else None

    @property
    def as_stored(self) -> CheckpointReader:
        """Reader of the same checkpoint without dequantization; GGUF files are always dequantized."""
        return self.underlying if isinstance(self._store, DequantizedStore) and self.underlying is not None else self

    @property
    def recodes(self) -> bool:
        """True if tensors have other bytes than the files: dequantized or cast."""
        return isinstance(self._store, GgufStore | DequantizedStore | CastStore)

    def __contains__(self, name: object) -> bool:
        return name in self._store.infos

    def names(self) -> list[str]:
        """List all tensor names, by shard file name and then in the order of the shard."""
        return list(self._store.infos)

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape, size in bytes and file of a tensor, without loading it.

        Raises SurgeryError: there is no such tensor.
        """
        try:
            return self._store.infos[name]
        except KeyError:
            raise SurgeryError.at(self.source, f"no tensor {name}; check the model family and the weights") from None

    def tensor(self, name: str) -> Tensor:
        """Load a tensor to the CPU in its stored dtype; the caller owns the memory.

        Raises SurgeryError: there is no such tensor, or the file cannot be read.
        """
        info = self.info(name)
        out = torch.empty(info.nbytes, dtype=torch.uint8)
        self._store.read(name, [(0, info.nbytes)], out)
        return out.view(info.dtype).reshape(info.shape)

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Load the tensors of a module by full name; ``model.layers.1`` does not match ``model.layers.10``."""
        module = prefix.rstrip(".") + "." if prefix else ""
        return {name: self.tensor(name) for name in self.names() if name.startswith(module)}

    def rows(self, name: str, index: Tensor) -> Tensor:
        """Gather rows of a matrix [R, C] by int64 indices as [*index.shape, C]; reads only these rows, each once.

        Raises SurgeryError: there is no such matrix, or a row number is out of range.
        """
        info = self.info(name)
        if len(info.shape) != 2:
            raise SurgeryError.at(self.source, f"{name} is {describe(info)}, not a matrix with rows")
        unique, inverse = torch.unique(index.cpu(), return_inverse=True)
        if len(unique) and not 0 <= int(unique[0]) <= int(unique[-1]) < info.shape[0]:
            bad = int(unique[0] if unique[0] < 0 else unique[-1])
            raise SurgeryError.at(
                self.source, f"{name} has no row {bad}, only {info.shape[0]} rows; does the tokenizer match the model?"
            )
        row_bytes = info.shape[1] * info.dtype.itemsize
        ranges = [(start * row_bytes, stop * row_bytes) for start, stop in _runs(unique)]
        buffer = torch.empty(len(unique), row_bytes, dtype=torch.uint8)
        self._store.read(name, ranges, buffer.reshape(-1))
        # Gathered as uint8, since older torch versions cannot index all dtypes.
        rows = buffer if index.ndim == 1 and torch.equal(unique, index.cpu()) else buffer[inverse.reshape(-1)]
        return rows.view(info.dtype).reshape(*index.shape, info.shape[1])

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Yield the elements of a tensor in order, flat, in chunks of at most 16 MiB.

        The chunks share memory: each is valid until the next is requested. Raises SurgeryError: there is no such
        tensor, or the file cannot be read.
        """
        info = self.info(name)
        # One reused buffer: repeated allocations of this size from several threads accumulate in malloc's arenas.
        buffer = torch.empty(min(CHUNK_BYTES, info.nbytes), dtype=torch.uint8)
        for start in range(0, info.nbytes, CHUNK_BYTES):
            piece = buffer[: info.nbytes - start]
            self._store.read(name, [(start, start + len(piece))], piece)
            yield piece.view(info.dtype)

    @property
    def files(self) -> FolderFiles:
        """Sidecar and stray files of the opened folder, or of the temporary folder of a GGUF file."""
        return self._files if self.underlying is None else self.underlying.files

    def sidecars(self) -> list[Path]:
        """List the full paths of the checkpoint's files except weights and config.json, code included."""
        return self._files.paths

    def stamp(self) -> dict[str, list[int]]:
        """Return the current stamp of the files that loading reads (see :func:`stamp_of`)."""
        return self.underlying.stamp() if self.underlying is not None else stamp_of(self.source)

    def check_untouched(self) -> None:
        """Raise SurgeryError if a file was modified, added or removed since opening; does not hash contents."""
        if self.underlying is not None:
            self.underlying.check_untouched()
        elif self._stamp != (now := self.stamp()):
            before = self._stamp or {}
            changed = next(name for name in sorted({*before, *now}) if before.get(name) != now.get(name))
            raise SurgeryError(f"{changed}: was changed while it was read; start again")

    def fingerprint(self, progress: Callable[[int], None] | None = None) -> str:
        """Return the SHA-256 in hex over the config and every tensor's name, dtype, shape and bytes; computed once.

        It does not depend on the split into shards. ``progress`` is called after each tensor with its size in bytes.
        Raises SurgeryError: a file cannot be read.
        """
        return self.identity(progress).sha256

    def identity(self, progress: Callable[[int], None] | None = None) -> Identity:
        """Return the fingerprint and the stamp of the files when opened; takes the argument of `fingerprint`."""
        if self.underlying is not None:
            return self.underlying.identity(progress)
        if self._identity is None:
            self._identity = Identity(self._hashed(progress), self._stamp or self.stamp())
        return self._identity

    def recall(self, identity: Identity | None) -> bool:
        """Reuse an identity of an earlier run if the stamp is unchanged; return whether the fingerprint is known."""
        if self.underlying is not None:
            return self.underlying.recall(identity)
        if self._identity is None and identity is not None and identity.stamp == self._stamp == self.stamp():
            self._identity = identity
        return self._identity is not None

    def check_unchanged(self) -> None:
        """Raise SurgeryError if config or weights changed since the fingerprint; rehashes only if the stamp changed."""
        identity = self.identity()
        if self.stamp() != identity.stamp:
            now = CheckpointReader.open(self.source)  # with the current config
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
    """Merge ascending row indices into ranges [start, stop): 1 2 3 7 gives (1, 4), (7, 8)."""
    if not len(rows):
        return []
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), len(rows)]
    return [(int(rows[start]), int(rows[stop - 1]) + 1) for start, stop in zip(starts, stops, strict=True)]
