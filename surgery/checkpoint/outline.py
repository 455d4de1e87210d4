"""A checkpoint of given shapes with nothing in it, for what looks at shapes alone: its weights are a hole in a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.checkpoint.layout import CONFIG, WEIGHTS
from surgery.checkpoint.reader import CheckpointReader
from surgery.checkpoint.safetensors_format import encode_header
from surgery.checkpoint.tensors import TensorSpec
from surgery.common.lineage import REPORT


def write_outline(
    folder: Path, source: CheckpointReader, config: Mapping[str, Any], tensors: Mapping[str, TensorSpec]
) -> None:
    """Makes the folder: config.json, zeros that take no place on most disks, and what lies next to the source's
    weights.

    The source's report is left out, which tells of other weights.
    """
    folder.mkdir(parents=True)
    for path in source.sidecars():
        if path.name != REPORT:
            place = folder / path.relative_to(source.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    (folder / CONFIG).write_text(json.dumps(dict(config)), encoding="utf-8")
    header, _ = encode_header(tensors, {"format": "pt"})
    with open(folder / WEIGHTS, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(spec.nbytes for spec in tensors.values()))
