"""GGUF header: metadata, and each tensor's type, shape and offset.

The ``gguf`` package's reader takes seconds for the vocabulary of a small model and keeps the file mapped. Layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.location import MAGIC
from surgery.common.errors import SurgeryError

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# struct format by GGUF value type.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = "general.alignment"
_INSTALL = 'pip install "model-surgery[gguf]"'


@dataclass(frozen=True)
class GgufTensor:
    """Tensor stored in a GGUF file: GGML type, shape with rows first, and file offset of its first byte.

    A row has ``columns`` elements, 1 for a vector, and ``row_bytes``; quantization blocks never cross rows.
    """

    type: str
    shape: tuple[int, ...]
    columns: int
    row_bytes: int
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.columns * self.row_bytes


@dataclass(frozen=True)
class GgufHeader:
    """Header of a GGUF file: key-value metadata, and tensors by GGUF name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def require_gguf() -> None:
    """Raise SurgeryError with the install command if the gguf package is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise SurgeryError(f"GGUF files need the gguf package: {_INSTALL}") from None


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file, without tensor data.

    Raises SurgeryError: the file is not GGUF, is damaged, or is truncated.
    """
    require_gguf()
    with disk_errors(path), open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise SurgeryError.at(path, "not a GGUF file (it does not start with GGUF); download it again")
        size = path.stat().st_size
        reader = _Reader(file, size)
        try:
            version = reader.scalar("I")
            if version not in _VERSIONS:
                raise SurgeryError.at(
                    path,
                    f"GGUF version {version}, or a big-endian file, is not supported; use a little-endian file of "
                    f"version {' or '.join(map(str, _VERSIONS))}",
                )
            tensor_count, metadata_count = reader.scalar("Q"), reader.scalar("Q")
            metadata = dict(reader.pair() for _ in range(metadata_count))
            entries = [reader.tensor() for _ in range(tensor_count)]
            alignment = int(metadata.get(_ALIGNMENT, 32))
            if alignment < 1:
                raise ValueError(f"alignment {alignment} is not positive")
            start = math.ceil(file.tell() / alignment) * alignment
            tensors = {name: _tensor_of(start, *entry) for name, *entry in entries}
        except EOFError:
            raise SurgeryError.at(path, f"truncated at {size} bytes, inside its header; download it again") from None
        except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError, struct.error) as error:
            raise SurgeryError.at(path, f"damaged GGUF header ({error}); download it again") from None
    if len(tensors) != len(entries):
        raise SurgeryError.at(path, "damaged GGUF header (duplicate tensor name); download it again")
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
    if size < end:
        raise SurgeryError.at(path, f"truncated: {size} bytes, its header says {end}; download it again")
    return GgufHeader(metadata, tensors)


def _tensor_of(start: int, number: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType(number)
    block, nbytes = GGML_QUANT_SIZES[kind]
    columns = shape[-1] if len(shape) > 1 else 1
    if columns < 1 or columns % block:
        raise ValueError(f"rows of {columns} elements do not divide into blocks of {block}")
    return GgufTensor(kind.name, shape, columns, columns // block * nbytes, start + offset)


class _Reader:
    """Sequential reader of header values; raises EOFError if the file ends within a value."""

    def __init__(self, file: BinaryIO, size: int):
        self._file, self._size = file, size

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def pair(self) -> tuple[str, Any]:
        return self._string(), self._value(self.scalar("I"))

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Read a tensor's name, type number, shape, and offset from the start of the tensor data."""
        name, dims = self._string(), self.scalar("I")
        if not 1 <= dims <= 4:
            raise ValueError(f"{name} has {dims} dimensions")
        shape = struct.unpack(f"<{dims}Q", self._bytes(8 * dims))
        return name, self.scalar("I"), shape[::-1], self.scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            code = f"<{count}{_SCALARS[kind]}"
            return list(struct.unpack(code, self._bytes(struct.calcsize(code))))
        return [self._value(kind) for _ in range(count)]

    def _string(self) -> str:
        return self._bytes(self.scalar("Q")).decode("utf-8", errors="replace")

    def _bytes(self, count: int) -> bytes:
        # Check before reading, so that a damaged length is not allocated.
        if count > self._size - self._file.tell():
            raise EOFError
        return self._file.read(count)
