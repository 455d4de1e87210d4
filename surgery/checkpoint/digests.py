"""What the files of a checkpoint hold, in digests: of each file, and of what its tensors belong to.

The SHA-256 of a file says whether it is the one that was written, whoever sent it. Checksums of its parts say where a
damaged one differs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.hub import is_downloaded
from surgery.checkpoint.safetensors_format import read_header
from surgery.checkpoint.tensors import CHUNK_BYTES

_READERS = 4
# A layer's attention, its feed-forward part, each of its norms: model.layers.7.self_attn.
_DEPTH = 4


@dataclass(frozen=True)
class Digest:
    """What a file holds.

    Attributes:
        sha256: of the file, in hex.
        parts: of a safetensors file: CRC-32, in hex, of the names and bytes of the tensors of each module.
    """

    bytes: int
    sha256: str
    parts: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: value for name, value in asdict(self).items() if value != {}}

    def differing(self, other: Digest) -> list[str]:
        """Modules whose tensors are not those of the other; none where only a header differs."""
        return [name for name in {**self.parts, **other.parts} if self.parts.get(name) != other.parts.get(name)]


def files_of(folder: Path, but: Collection[str] = ()) -> list[str]:
    """Files of a folder and its subfolders that make a checkpoint, wherever it is downloaded to; in order."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        found += [Path(root, name).relative_to(folder).as_posix() for name in files if not name.startswith(".")]
    return sorted(name for name in found if name not in but and is_downloaded(name))


def digests(folder: Path, files: Iterable[str], progress: Callable[[int], None] | None = None) -> dict[str, Digest]:
    """Digests of files of a folder, several of which are read at once; each is read from its start to its end, once.

    Args:
        progress: called after each file with the number of its bytes, from the calling thread.

    Raises:
        SurgeryError: one cannot be read, or is no safetensors file though it is called one.
    """
    files, found = list(files), {}
    with ThreadPoolExecutor(_READERS) as pool:
        for name, digest in zip(files, pool.map(lambda name: _digest(folder, name), files), strict=True):
            found[name] = digest
            if progress:
                progress(digest.bytes)
    return found


def _digest(folder: Path, name: str) -> Digest:
    path, whole, parts, size = folder / name, hashlib.sha256(), {}, 0
    with disk_errors(path), open(path, "rb", buffering=0) as file:
        for tensor, length in _spans(folder, name):
            part = ".".join(tensor.split(".")[:_DEPTH])
            if tensor:
                parts[part] = crc32(tensor.encode(), parts.get(part, 0))
            for piece in _pieces(file, length):
                whole.update(piece)
                size += len(piece)
                if tensor:
                    parts[part] = crc32(piece, parts[part])
    return Digest(size, whole.hexdigest(), {part: f"{crc:08x}" for part, crc in parts.items()})


def _spans(folder: Path, name: str) -> Iterator[tuple[str, int]]:
    """A file from its start to its end: the name and length of each tensor, and without a name what is none."""
    if name.endswith(".safetensors"):
        tensors = sorted((start, info.nbytes, tensor) for tensor, (info, start) in read_header(folder, name).items())
        if tensors:
            yield "", tensors[0][0]
            for _, length, tensor in tensors:
                yield tensor, length
            return
    yield "", (folder / name).stat().st_size


def _pieces(file: BinaryIO, length: int) -> Iterator[bytes]:
    while length and (piece := file.read(min(length, CHUNK_BYTES))):
        yield piece
        length -= len(piece)
