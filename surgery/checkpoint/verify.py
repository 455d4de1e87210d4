"""Verification of a written checkpoint against its plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from surgery.checkpoint.reader import CheckpointReader
from surgery.checkpoint.tensors import Described, all_finite, describe
from surgery.common.errors import SurgeryError

_SHOWN = 5


def verify_files(path: str | Path, plan: Mapping[str, Described]) -> None:
    """Check that a folder contains exactly the planned tensors, with finite values, and a valid config.json.

    Reads every byte. Raises SurgeryError: the folder cannot be opened or differs from the plan; lists the first
    differences.
    """
    reader = CheckpointReader.open(Path(path))
    faults = [f"{name} is missing" for name in plan if name not in reader]
    for name in reader.names():
        info = reader.info(name)
        if name not in plan:
            faults.append(f"{name} is not in the plan")
        elif (info.dtype, info.shape) != (plan[name].dtype, tuple(plan[name].shape)):
            faults.append(f"{name} is {describe(info)} instead of {describe(plan[name])}")
        elif not all(map(all_finite, reader.chunks(name))):
            faults.append(f"{name} contains NaN or infinity")
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise SurgeryError.at(path, f"differs from its plan: {'; '.join(faults[:_SHOWN])}{more}")
