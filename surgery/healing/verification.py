"""Verification of a healed checkpoint: the student's tensors and config, KV bytes, and decoding through the caches."""

from __future__ import annotations

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.running.unfused import unfused
from surgery.training.settings import HealSettings
from surgery.verification.again import open_written, verify_again
from surgery.verification.written import Verification


def verify_healed(
    healed: CheckpointReader, student: CheckpointReader, settings: HealSettings, progress: Progress
) -> Verification:
    """Run a healed checkpoint layer by layer, with and without its caches.

    Raises SurgeryError: tensors or config differ from the student's, decoding differs from one forward pass, or the
    caches hold other bytes than predicted.
    """
    _check_form(healed, student)
    view = unfused(healed)
    opened = open_written(view, "cpu" if settings.device == "cpu" else "auto")
    return verify_again(view, opened, settings.seed, progress)


def _check_form(healed: CheckpointReader, student: CheckpointReader) -> None:
    """Raise SurgeryError if tensor names, shapes, dtypes or the class in the config differ from the student's."""
    shapes = [
        {name: (reader.info(name).shape, reader.info(name).dtype) for name in reader.names()}
        for reader in (healed, student)
    ]
    if different := sorted(name for name in {*shapes[0], *shapes[1]} if shapes[0].get(name) != shapes[1].get(name)):
        raise SurgeryError.at(healed.path, f"{different[0]} differs from the checkpoint that was healed; heal it again")
    for name in ("model_type", "architectures", "attention_layers", "kv_cache"):
        if healed.config.get(name) != student.config.get(name):
            raise SurgeryError.at(
                healed.path, f"{name} in its config.json differs from the checkpoint that was healed; heal it again"
            )
