"""Checkpoint of given shapes with zero weights in a sparse file, for checks that need only shapes."""

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
    """Write the folder: config.json, zero weights as a sparse file, and the source's sidecars.

    The source's report is left out, since it describes other weights.
    """
    folder.mkdir(parents=True)
    for path in source.sidecars():
        if path.name != REPORT:
            target = folder / path.relative_to(source.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    (folder / CONFIG).write_text(json.dumps(dict(config)), encoding="utf-8")
    header, _ = encode_header(tensors, {"format": "pt"})
    with open(folder / WEIGHTS, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(spec.nbytes for spec in tensors.values()))
