"""Folder of a checkpoint that transformers can load."""

from __future__ import annotations

from pathlib import Path

from surgery.checkpoint.layout import CONFIG
from surgery.checkpoint.reader import CheckpointReader
from surgery.checkpoint.tensors import TensorSpec
from surgery.checkpoint.writer import CheckpointWriter


def model_folder(reader: CheckpointReader) -> Path:
    """Return the folder of the stored checkpoint, or a temporary copy of weights that are dequantized or cast.

    The copy takes 2 bytes per parameter (4 in float32) in the folder for temporary files until the process exits.
    Raises SurgeryError: the file cannot be read, or the disk is full.
    """
    while not reader.recodes and reader.underlying is not None:
        reader = reader.underlying
    out = reader.path.parent / "weights" / reader.path.name
    if not reader.recodes or out.exists():
        return out if reader.recodes else reader.path
    plan = {name: TensorSpec(reader.info(name).dtype, reader.info(name).shape) for name in reader.names()}
    with CheckpointWriter(out, plan) as writer:
        for name in plan:
            writer.copy(name, reader)
        writer.write_json(CONFIG, reader.config)
        for path in reader.sidecars():
            writer.copy_file(path, path.relative_to(reader.path))
        writer.commit()
    return out
