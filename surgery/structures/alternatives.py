"""New tensors of every layer in more than one form, until it is known which form loses least.

A layer-wise fit lowers its own error on its own text; whether the model is better for it shows once all layers have
passed. So both forms wait on disk, and what is written is the one whose held-out loss is lower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from surgery.calibration.held_out import Score
from surgery.checkpoint import CheckpointWriter
from surgery.checkpoint.disk import disk_errors
from surgery.common.layer_files import LayerFiles


class Alternatives(LayerFiles):
    """One file a layer and form."""

    def __init__(self, parent: Path | None = None):
        super().__init__("alternatives", parent)

    def save(self, form: str, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Raises SurgeryError where the disk is full."""
        path = self._path(layer, f"-{form}.safetensors")
        with disk_errors(path):
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    def write(self, form: str, layers: int, writer: CheckpointWriter) -> None:
        """Writes the tensors of all layers in one form."""
        for layer in range(layers):
            for name, tensor in load_file(self._path(layer, f"-{form}.safetensors")).items():
                writer.write(name, tensor)


def least_loss(forms: Sequence[str], scores: Mapping[str, Score]) -> str:
    """The form of least held-out loss, the earlier of equal ones; the last where no loss was measured.

    A loss that is no number is more than any other. Forms that were given up on the way have no score.
    """
    forms = [form for form in forms if form in scores]
    if scores[forms[-1]].loss is None:
        return forms[-1]
    return min(forms, key=lambda form: math.inf if math.isnan(scores[form].loss) else scores[form].loss)
