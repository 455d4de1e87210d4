"""File layout of a checkpoint folder: weights with their index, sidecar files, and allowed links."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surgery.checkpoint.disk import check_encoding, disk_errors, read_json
from surgery.checkpoint.file_kinds import CARRIED, CONFIG, READ_BY_LOADERS, Kind, kind_of, list_files
from surgery.common.errors import SurgeryError

if TYPE_CHECKING:
    from surgery.checkpoint.tensors import TensorInfo

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
WEIGHT_FILES = (WEIGHTS, WEIGHTS_INDEX, *PICKLES)

ADAPTER = "adapter_config.json"
_RANK_SHARD = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""Per-rank shard of torch's distributed checkpoints, which transformers prefers to all other weights."""

_HUB_BLOB = re.compile(r".*/models--[^/]+/blobs/[0-9a-f]{40}([0-9a-f]{24})?")


@dataclass(frozen=True)
class Weights:
    """Weight files of a checkpoint, and the index's map from tensor to file if there is an index."""

    files: list[str]
    index: dict[str, str] | None


def find_weights(folder: Path) -> Weights:
    """Find the weight files of a folder and check that all exist.

    Raises SurgeryError: there are no weights or only pickled ones, a shard is missing, the index is damaged or contains
    a path, or transformers would load other files.
    """
    _check_rivals(folder)
    weights = _find(folder)
    if weights is None:
        raise SurgeryError.at(
            folder,
            f"no weights ({WEIGHTS}, or {WEIGHTS_INDEX} with its shards); use a complete checkpoint. Pickled weights "
            f"({PICKLES[0]}) are not read: load them in transformers and save them with save_pretrained",
        )
    try:
        missing = [file for file in weights.files if not (folder / file).is_file()]
    except (OSError, ValueError) as error:  # too long or invalid as a file name
        raise SurgeryError.at(folder, f"its index contains invalid file names ({error}); download it again") from None
    if missing:
        raise SurgeryError.at(
            folder,
            f"{len(missing)} of {len(weights.files)} weight files missing, first {missing[0]};"
            " download the checkpoint again",
        )
    return weights


def _check_rivals(folder: Path) -> None:
    """Refuse a folder with an adapter, or with weights that transformers would load instead."""
    if os.path.lexists(folder / ADAPTER):
        raise SurgeryError.at(
            folder,
            f"contains an adapter ({ADAPTER}), which would be ignored; merge it (peft: merge_and_unload, then"
            " save_pretrained) and use that folder, or remove the adapter's files",
        )
    with disk_errors(folder):
        shards = sorted(name for name in os.listdir(folder) if _RANK_SHARD.fullmatch(name))
    if shards:
        raise SurgeryError.at(
            folder,
            f"{shards[0]} is a shard of a distributed checkpoint, which transformers would load instead"
            " of other weights; consolidate it (load and save_pretrained), or remove it",
        )


def is_hub_blob(path: Path) -> bool:
    """Return whether a resolved path is a file in the hub's cache that is named by its content hash."""
    return _HUB_BLOB.fullmatch(path.as_posix()) is not None


def check_index(folder: Path, weights: Weights, infos: Mapping[str, TensorInfo]) -> None:
    """Check that each tensor of the index is in its shard.

    Tensors in the shards that are missing in the index belong to the checkpoint: transformers loads whole shards.
    Raises SurgeryError: a tensor is in another shard or in none.
    """
    for name, file in (weights.index or {}).items():
        if name not in infos:
            raise SurgeryError.at(folder, f"the index lists {name}, which no shard contains; download it again")
        if infos[name].file != file:
            raise SurgeryError.at(
                folder, f"{name} is in {infos[name].file}, but the index says {file}; download the checkpoint again"
            )


@dataclass(frozen=True)
class FolderFiles:
    """Files of a checkpoint folder other than its weights, by relative path: those of the checkpoint, and strays.

    Strays are all other files, and weights of other formats; they are never read.
    """

    folder: Path
    sidecars: tuple[str, ...]
    strays: tuple[str, ...]

    @property
    def paths(self) -> list[Path]:
        """Full paths of the sidecars."""
        return [self.folder / name for name in self.sidecars]


def find_sidecars(folder: Path, weights: Iterable[str] = ()) -> FolderFiles:
    """Classify the files below a folder, except hidden files, config.json, index files and ``weights``.

    Links to files count as files; links to folders are not followed. Raises SurgeryError: the folder cannot be read, or
    a sidecar is a broken link.
    """
    read = {CONFIG, WEIGHTS_INDEX, *weights}
    with disk_errors(folder):
        names = [name for name in list_files(folder) if name not in read]
    for name in names:
        check_encoding(folder / name)
    sidecars = tuple(name for name in names if _is_sidecar(name))
    for name in sidecars:
        if not (folder / name).is_file():
            path = folder / name
            raise SurgeryError.at(
                path, "is a broken link or not a regular file; remove it or download the checkpoint again"
            )
    return FolderFiles(folder, sidecars, tuple(name for name in names if name not in set(sidecars)))


def stamp_of(path: Path) -> dict[str, list[int]]:
    """Return size, inode, mtime and ctime of a file, or of all files of a folder that loading may read.

    The stamp is equal as long as no file is modified, added or removed. Tools can reset mtime, but not ctime. Raises
    SurgeryError: a file cannot be read.
    """
    with disk_errors(path):
        files = [path] if path.is_file() else [path / name for name in list_files(path) if _is_loaded(name)]
        stats = {str(each.absolute()): each.stat() for each in files if each.exists()}
    return {name: [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in stats.items()}


def _is_sidecar(name: str) -> bool:
    if name.endswith("/") or "__pycache__" in name.split("/"):
        return False
    return kind_of(name) in CARRIED | {Kind.CODE, Kind.RECORD}


def _is_loaded(name: str) -> bool:
    """Return whether loading may read a file; weights in subfolders belong to training runs and exports."""
    kind = kind_of(name)
    return kind in READ_BY_LOADERS and (kind is not Kind.WEIGHTS or "/" not in name)


def _find(folder: Path) -> Weights | None:
    """Find the weights, or None; refuse an index next to a single file, which transformers would load."""
    has_single = os.path.lexists(folder / WEIGHTS)
    index = _read_index(folder / WEIGHTS_INDEX) if os.path.lexists(folder / WEIGHTS_INDEX) else None
    if index is not None:
        files = sorted(set(index.values()))
        if has_single and files != [WEIGHTS]:
            raise SurgeryError.at(
                folder, f"has both {WEIGHTS} and an {WEIGHTS_INDEX} of other files; remove the stale one"
            )
        return Weights(files, index)
    return Weights([WEIGHTS], None) if has_single else None


def _read_index(path: Path) -> dict[str, str]:
    """Read the weight map of an index file and check that each value is a plain file name."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SurgeryError.at(path, "has no weight_map; download it again")
    for name, file in weight_map.items():
        # A shard may be a link, as in the hub's cache, but the index must not contain paths.
        if not isinstance(file, str) or file in ("", ".", "..") or any(mark in file for mark in "/\\:\0"):
            raise SurgeryError.at(
                path, f"{name} is in {file!r}, which is not a plain file name; do not trust this index"
            )
    return weight_map
