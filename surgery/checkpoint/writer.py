"""Streaming writer of a checkpoint: tensors in any order, to a plan that is fixed at the start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from surgery.checkpoint.disk import disk_errors, parse_size, write_at
from surgery.checkpoint.layout import WEIGHTS, WEIGHTS_INDEX
from surgery.checkpoint.safetensors_format import encode_header
from surgery.checkpoint.staging import MARKER, Staging
from surgery.checkpoint.tensors import NAME_OF_DTYPE, Described, TensorSpec, all_finite, as_bytes, describe
from surgery.common.errors import SurgeryError

if TYPE_CHECKING:
    from surgery.checkpoint.reader import CheckpointReader


class CheckpointWriter:
    """Context manager that streams tensors to ``<out>.partial``, which `commit` renames to ``out``.

    Leaving the context without a commit removes everything that was written.

    Args:
        plan: dtype and shape of every tensor, in the order of the files.
        max_shard_size: bytes of tensors per file, or ``5GB``, ``500MiB``; a larger tensor gets a separate file.
        overwrite: replace ``out`` if it is a result of this program or empty.
        metadata: metadata of each safetensors file; default ``{"format": "pt"}``, which transformers requires.
        staging: staging of ``out``, created and discarded by the caller.
        stored_names: names in the files, for tensors with other names in the plan.

    Raises SurgeryError: the plan cannot be stored, ``out`` may not be written, or the disk is too full.
    """

    def __init__(
        self,
        out: str | Path,
        plan: Mapping[str, Described],
        *,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
        metadata: Mapping[str, str] | None = None,
        staging: Staging | None = None,
        stored_names: Mapping[str, str] | None = None,
    ):
        self.plan = {name: _checked_spec(name, tensor) for name, tensor in plan.items()}
        if not self.plan:
            raise SurgeryError.at(out, "the plan has no tensors")
        self._shards = _split_into_shards(self.plan, parse_size(max_shard_size))
        self._stored_names = dict(stored_names or {})
        self._metadata = {"format": "pt"} if metadata is None else metadata
        self._external_staging, self._staging = staging is not None, staging or Staging(Path(out), overwrite=overwrite)
        self.out, self.partial = self._staging.out, self._staging.partial
        self._total_bytes = sum(spec.nbytes for spec in self.plan.values())
        self._staging.check_space(self._total_bytes)
        self._locations: dict[str, tuple[Path, int]] = {}
        self._written: set[str] = set()
        self._open = False

    def __enter__(self) -> CheckpointWriter:
        if not self._external_staging:
            self._staging.create()
        try:
            self._create_files()
        except BaseException:
            self._discard()
            raise
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._discard()

    def _discard(self) -> None:
        if not self._external_staging:
            self._staging.discard()

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a planned tensor, from any device.

        Raises SurgeryError: it is not in the plan, was written before, has another dtype or shape, holds NaN or
        infinity, or the disk is full.
        """
        self._check_planned(name, tensor)
        tensor = tensor.detach().cpu().contiguous()
        self._write_chunk(name, tensor, offset=0)
        self._written.add(name)

    def copy(self, name: str, reader: CheckpointReader) -> None:
        """Copy the bytes of a planned tensor from another checkpoint.

        Raises SurgeryError as `write`, or the other checkpoint lacks the tensor or cannot be read.
        """
        self._check_planned(name, reader.info(name))
        offset = 0
        for piece in reader.chunks(name):
            self._write_chunk(name, piece, offset)
            offset += piece.nbytes
        self._written.add(name)

    def write_json(self, name: str, value: Any) -> None:
        """Write an indented JSON file such as ``config.json``; replaces an earlier file of that name."""
        self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a UTF-8 text file; ``name`` may contain folders. Replaces an earlier file of that name."""
        path = self._sidecar_path(name)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")

    def copy_file(self, source: str | Path, relative: str | Path) -> None:
        """Copy a file's content, following links, to a relative path in the output."""
        path = self._sidecar_path(relative)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)

    def missing(self) -> list[str]:
        """List the planned tensors that are not written yet."""
        return [name for name in self.plan if name not in self._written]

    def finish(self) -> None:
        """Flush the weights to disk; ``partial`` can then be opened by readers, and other files may still be added.

        Raises SurgeryError: planned tensors were not written, or the disk is full.
        """
        self._require_open()
        if missing := self.missing():
            raise SurgeryError.at(self.out, f"{len(missing)} planned tensors were not written, first {missing[0]}")
        self._staging.sync()

    def commit(self) -> None:
        """Rename ``partial`` to ``out``; an older checkpoint is removed after that.

        Raises SurgeryError as `finish`, or the rename failed; an older checkpoint is then restored.
        """
        self.finish()
        self._staging.commit()
        self._open = False

    def _create_files(self) -> None:
        """Create every shard with its header and full size, and the index."""
        files = _shard_names(len(self._shards))
        for file, specs in zip(files, self._shards, strict=True):
            path = self.partial / file
            header, offsets = encode_header({self._stored(n): spec for n, spec in specs.items()}, self._metadata)
            with disk_errors(path), open(path, "wb") as handle:
                handle.write(header)
                handle.truncate(len(header) + sum(spec.nbytes for spec in specs.values()))
            self._locations |= {name: (path, offsets[self._stored(name)]) for name in specs}
        if len(files) > 1:
            weight_map = {self._stored(name): self._locations[name][0].name for name in self._locations}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            path = self.partial / WEIGHTS_INDEX
            with disk_errors(path):
                path.write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @property
    def stored_plan(self) -> dict[str, TensorSpec]:
        """Plan by stored name."""
        return {self._stored(name): spec for name, spec in self.plan.items()}

    def _stored(self, name: str) -> str:
        return self._stored_names.get(name, name)

    def _check_planned(self, name: str, tensor: Described) -> None:
        """Check a tensor against the plan."""
        self._require_open()
        spec = self.plan.get(name)
        if spec is None:
            raise SurgeryError.at(self.out, f"{name} is not in the plan")
        if name in self._written:
            raise SurgeryError.at(self.out, f"{name} was written before")
        if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise SurgeryError.at(self.out, f"{name} is planned as {describe(spec)} but is {describe(tensor)}")

    def _write_chunk(self, name: str, piece: Tensor, offset: int) -> None:
        """Write a contiguous chunk of a tensor at a byte offset."""
        if not all_finite(piece):
            raise SurgeryError.at(self.out, f"{name} contains NaN or infinity; the output was discarded")
        path, start = self._locations[name]
        with disk_errors(path):
            write_at(path, start + offset, memoryview(as_bytes(piece).numpy()))

    def _sidecar_path(self, relative: str | Path) -> Path:
        """Return the path for a sidecar file; refuse paths outside the output and files of the writer."""
        self._require_open()
        path = PurePosixPath(relative)
        ours = {MARKER, WEIGHTS_INDEX, *(file.name for file, _ in self._locations.values())}
        if path.is_absolute() or ".." in path.parts or str(path) in {".", *ours}:
            raise SurgeryError.at(self.out, f"cannot write a file {str(relative)!r} into it; choose another name")
        return self.partial / path

    def _require_open(self) -> None:
        if not self._open:
            raise SurgeryError.at(self.out, "its writer is not open; use it in a with block, before commit")


def _checked_spec(name: str, tensor: Described) -> TensorSpec:
    if not name or name == "__metadata__":
        raise SurgeryError(f"{name!r} is not a valid tensor name")
    if tensor.dtype not in NAME_OF_DTYPE:
        raise SurgeryError(f"{name} is planned as {describe(tensor)}; safetensors has no such dtype")
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def _split_into_shards(plan: Mapping[str, TensorSpec], max_bytes: int) -> list[dict[str, TensorSpec]]:
    """Split the plan, in order, into shards of at most ``max_bytes`` of tensors."""
    shards: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in plan.items():
        if shards[-1] and filled + spec.nbytes > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += spec.nbytes
    # Wider dtypes first in each shard: the format has no padding, and readers need aligned views. Within a dtype the
    # plan's order is kept.
    return [dict(sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize)) for shard in shards]


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
