"""New tensors of every converted layer on disk, from which an interrupted conversion resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from surgery.checkpoint import CheckpointWriter
from surgery.checkpoint.disk import disk_errors
from surgery.common.layer_files import LayerFiles


class ConvertedLayers(LayerFiles):
    """Store of new tensors, one safetensors file per layer."""

    def __init__(self, parent: Path | None = None):
        super().__init__("converted", parent)

    def save(self, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Save the new tensors of a layer; raise SurgeryError if the disk is full."""
        path = self._path(layer, ".safetensors")
        with disk_errors(path):
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    def write(self, layers: int, writer: CheckpointWriter) -> None:
        """Write the tensors of all layers to the output checkpoint."""
        for layer in range(layers):
            for name, tensor in load_file(self._path(layer, ".safetensors")).items():
                writer.write(name, tensor)
