"""Reading and writing of safetensors headers.

A file consists of the header length (8 bytes, little-endian), a JSON header with each tensor's dtype, shape and byte
range, and the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.tensors import DTYPE_OF_NAME, NAME_OF_DTYPE, TensorInfo, TensorSpec
from surgery.common.errors import SurgeryError

# The safetensors library refuses longer headers.
MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"


def read_header(folder: Path, file: str) -> dict[str, tuple[TensorInfo, int]]:
    """Read the header of a safetensors file: each tensor's info and file offset, in the header's order.

    Raises SurgeryError: the header is invalid, or the file size does not match it.
    """
    path = folder / file
    with disk_errors(path), open(path, "rb") as handle:
        size = path.stat().st_size
        length_bytes = handle.read(8)
        if length_bytes == b"version ":
            raise SurgeryError.at(path, "a git-lfs pointer, not the weights; run `git lfs pull` in that folder")
        length = int.from_bytes(length_bytes, "little")
        if length > MAX_HEADER_BYTES:
            raise SurgeryError.at(path, "not a safetensors file (no header at its start); download it again")
        if size < 8 + length:
            raise SurgeryError.at(path, f"truncated at {size} bytes, inside its header; download it again")
        header_bytes = handle.read(length)

    try:
        header = json.loads(header_bytes, object_pairs_hook=_unique)
        tensors = {name: _entry(name, entry, file) for name, entry in header.items() if name != _METADATA}
        end = _end_of_data([(start, info.nbytes) for info, start in tensors.values()])
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise SurgeryError.at(path, f"damaged safetensors header ({error}); download it again") from error

    data_start = 8 + length
    if size != data_start + end:
        fault = "truncated" if size < data_start + end else "too long"
        raise SurgeryError.at(path, f"{fault}: {size} bytes, its header says {data_start + end}; download it again")
    return {name: (info, data_start + start) for name, (info, start) in tensors.items()}


def encode_header(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Encode the header for consecutive ``tensors``; return its bytes and each tensor's offset in the file.

    Raises SurgeryError: the header is longer than readers accept.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, spec in tensors.items():
        start, end = end, end + spec.nbytes
        header[name] = {"dtype": NAME_OF_DTYPE[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the data starts aligned
    if len(text) > MAX_HEADER_BYTES:
        raise SurgeryError(
            f"the header of a shard of {len(tensors)} tensors is too long; choose a smaller max_shard_size"
        )
    data_start = 8 + len(text)
    offsets = {name: data_start + header[name]["data_offsets"][0] for name in tensors}
    return len(text).to_bytes(8, "little") + text, offsets


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object and reject duplicate keys, of which json would silently keep the last."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)!r}")
    return entries


def _entry(name: str, entry: Any, file: str) -> tuple[TensorInfo, int]:
    """Parse a header entry to an info and its offset in the data; raise ValueError if it is inconsistent."""
    dtype = DTYPE_OF_NAME.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{name} has dtype {entry['dtype']}, which is not supported")
    shape, (start, stop) = entry["shape"], entry["data_offsets"]
    # isinstance would accept JSON's true as 1.
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"{name} has an invalid shape {shape} or offsets {[start, stop]}")
    nbytes = math.prod(shape) * dtype.itemsize
    if stop - start != nbytes:
        raise ValueError(f"{name} of shape {shape} needs {nbytes} bytes but has {stop - start}")
    return TensorInfo(dtype, tuple(shape), nbytes, file), start


def _end_of_data(ranges: list[tuple[int, int]]) -> int:
    """Return the end of the last tensor; raise ValueError if (start, length) ranges overlap or leave gaps."""
    end = 0
    for start, length in sorted(ranges):
        if start != end:
            raise ValueError(f"tensors overlap or leave a gap at byte {min(start, end)}")
        end = start + length
    return end
