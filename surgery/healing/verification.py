"""A healed checkpoint is held to what its conversion was held to: same form, same bytes, and caches that compute."""

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
    """Runs a healed checkpoint layer by layer, through its caches and without.

    Raises:
        SurgeryError: it has other tensors or another config than the student, does not decode what one pass computes,
            or its caches hold other bytes.
    """
    _check_form(healed, student)
    view = unfused(healed)
    opened = open_written(view, "cpu" if settings.device == "cpu" else "auto")
    return verify_again(view, opened, settings.seed, progress)


def _check_form(healed: CheckpointReader, student: CheckpointReader) -> None:
    """Raises SurgeryError where the healed checkpoint is not of the student's form: stock must stay stock."""
    shapes = [
        {name: (reader.info(name).shape, reader.info(name).dtype) for name in reader.names()}
        for reader in (healed, student)
    ]
    if different := sorted(name for name in {*shapes[0], *shapes[1]} if shapes[0].get(name) != shapes[1].get(name)):
        raise SurgeryError.at(healed.path, f"{different[0]} is not as in the checkpoint that was healed")
    for name in ("model_type", "architectures", "attention_layers", "kv_cache"):
        if healed.config.get(name) != student.config.get(name):
            raise SurgeryError.at(healed.path, f"{name} of its config is not that of the checkpoint that was healed")
