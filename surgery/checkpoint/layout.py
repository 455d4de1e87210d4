"""Which files of a folder are weights, which belong beside them, and whether the index tells the truth."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surgery.checkpoint.disk import check_encoding, disk_errors, read_json
from surgery.common.errors import SurgeryError

if TYPE_CHECKING:
    from surgery.checkpoint.tensors import TensorInfo

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"

# Weights of other formats and training states may lie beside the ones that are read; none of them is a sidecar.
_WEIGHT_SUFFIXES = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".distcp"),
    *(".gguf", ".h5", ".msgpack", ".ot", ".tflite", ".onnx", ".onnx_data"),
)


@dataclass(frozen=True)
class Weights:
    """The files that hold a checkpoint's tensors, and the index's file of each tensor where there is an index."""

    files: list[str]
    index: dict[str, str] | None
    pickled: bool


def find_weights(folder: Path, *, allow_pickle: bool) -> Weights:
    """The weight files of a folder, all of which exist.

    Raises:
        SurgeryError: there are none, a shard is missing, the index is damaged or names a path, or the weights are
            pickled and ``allow_pickle`` is off.
    """
    weights = _find(folder, WEIGHTS, WEIGHTS_INDEX, pickled=False) or _find(folder, PICKLE, PICKLE_INDEX, pickled=True)
    if weights is None:
        raise SurgeryError(
            f"{folder}: no weights ({WEIGHTS}, or {WEIGHTS_INDEX} with its shards); give a whole checkpoint, and"
            f" --allow-pickle where it has only {PICKLE}"
        )
    if weights.pickled and not allow_pickle:
        raise SurgeryError(f"{folder}: its weights are pickled ({PICKLE}); pass --allow-pickle if you trust them")
    try:
        missing = [file for file in weights.files if not (folder / file).is_file()]
    except (OSError, ValueError) as error:  # too long for a name, or text that cannot be one
        raise SurgeryError(f"{folder}: its index names impossible files ({error})") from None
    if missing:
        raise SurgeryError(
            f"{folder}: {len(missing)} of {len(weights.files)} weight files missing, first {missing[0]};"
            " download the checkpoint again"
        )
    check_links(folder, [folder / file for file in weights.files])
    return weights


def check_links(folder: Path, files: Iterable[Path]) -> None:
    """Refuses links that lead out of a folder: what it holds would have another file read, and copied into outputs.

    A snapshot in the hub's cache consists of links into the ``blobs`` beside ``snapshots``, which belong to it.

    Raises:
        SurgeryError: a file is such a link.
    """
    root = Path(os.path.realpath(folder))
    homes = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    for path in files:
        real = Path(os.path.realpath(path))
        if not any(home in real.parents for home in homes):
            raise SurgeryError(
                f"{path}: a link that leads out of its folder, to {real}; copy the file in its place if you trust it"
            )


def check_index(folder: Path, weights: Weights, infos: Mapping[str, TensorInfo]) -> None:
    """Checks that each tensor of the index is in the shard the index says.

    Tensors of the shards that the index does not name are part of the checkpoint all the same: transformers loads
    shards whole.

    Raises:
        SurgeryError: a tensor is in another shard or in none.
    """
    for name, file in (weights.index or {}).items():
        if name not in infos:
            raise SurgeryError(f"{folder}: the index names {name}, which is in no shard; download the checkpoint again")
        if infos[name].file != file:
            raise SurgeryError(
                f"{folder}: {name} is in {infos[name].file}, the index says {file}; download the checkpoint again"
            )


def find_sidecars(folder: Path) -> list[Path]:
    """Every file of the folder and its subfolders that is neither weights nor the top config.json nor hidden.

    Links to files count as files; links to folders are not followed.

    Raises:
        SurgeryError: a folder cannot be read, or a file is a link that leads nowhere.
    """
    found = []
    with disk_errors(folder):
        for root, folders, files in os.walk(folder, onerror=_raise):
            folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
            found += [Path(root, name) for name in sorted(files) if not name.startswith(".")]
    for path in found:
        check_encoding(path)
    sidecars = [path for path in found if path != folder / CONFIG and not path.name.endswith(_WEIGHT_SUFFIXES)]
    for path in sidecars:
        if not path.is_file():
            raise SurgeryError(f"{path}: a broken link or no regular file; remove it or download the checkpoint again")
    return sidecars


def _find(folder: Path, single: str, index_name: str, *, pickled: bool) -> Weights | None:
    """The weights of one format, or None; transformers, too, prefers the single file."""
    has_single = os.path.lexists(folder / single)
    index = _read_index(folder / index_name) if os.path.lexists(folder / index_name) else None
    if index is not None:
        check_links(folder, [folder / index_name])
        files = sorted(set(index.values()))
        if has_single and files != [single]:
            raise SurgeryError(f"{folder}: has both {single} and {index_name} of other files; remove the stale one")
        return Weights(files, index, pickled)
    return Weights([single], None, pickled) if has_single else None


def _read_index(path: Path) -> dict[str, str]:
    """The weight map of an index file; each value is a plain file name."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SurgeryError(f"{path}: has no weight_map; download it again")
    for name, file in weight_map.items():
        # A shard may itself be a link, as in the hub's cache; the index alone must not reach outside.
        if not isinstance(file, str) or file in ("", ".", "..") or any(mark in file for mark in "/\\:\0"):
            raise SurgeryError(
                f"{path}: {name} lies in {file!r}, which is not a plain file name; do not trust this index"
            )
    return weight_map


def _raise(error: OSError) -> None:
    raise error
