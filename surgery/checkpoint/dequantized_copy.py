"""Dequantized copy of a checkpoint, for loaders that cannot read its quantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from surgery.checkpoint.tensors import TensorSpec
from surgery.checkpoint.writer import CheckpointWriter

if TYPE_CHECKING:
    from surgery.checkpoint.reader import CheckpointReader


def dequantized_copy(reader: CheckpointReader) -> Path:
    """Return the folder of the copy, next to the reader's temporary folder; the first call writes it.

    Raises:
        SurgeryError: the file cannot be read, or the disk is full.
    """
    out = reader.path.parent / "weights" / reader.path.name
    if out.exists():
        return out
    plan = {name: TensorSpec(reader.info(name).dtype, reader.info(name).shape) for name in reader.names()}
    with CheckpointWriter(out, plan) as writer:
        for name in plan:
            writer.copy(name, reader)
        writer.write_json("config.json", reader.config)
        for path in reader.sidecars():
            writer.copy_file(path, path.relative_to(reader.path))
        writer.commit()
    return out
