"""A checkpoint of fused projections, seen as one of the family that it is but for that."""

from __future__ import annotations

from surgery.checkpoint import CheckpointReader
from surgery.families.base import LAYER_PREFIX
from surgery.families.fused import FUSED


def unfused(reader: CheckpointReader) -> CheckpointReader:
    """The reader itself, or a view of it under the names and with the config of the family that its model is read as.

    Raises:
        SurgeryError: the model has something that this family has not.
    """
    family = FUSED.get(reader.config.get("model_type"))
    if family is None:
        return reader
    config, of_layer, parts = family.config(reader.config), family.parts(reader.config), {}
    for layer in range(config["num_hidden_layers"]):
        prefix = LAYER_PREFIX.format(layer=layer)
        for module, names in of_layer.items():
            parts[f"{prefix}{module}.weight"] = {f"{prefix}{name}.weight": rows for name, rows in names.items()}
    return reader.seen_as(config, parts)
