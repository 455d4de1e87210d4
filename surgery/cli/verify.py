"""``surgery verify``: check of a converted checkpoint against its report."""

from __future__ import annotations

import sys
from typing import Annotated

from surgery.cli.options import CheckpointArgument, DeviceOption, JsonOption, option
from surgery.common.errors import SurgeryError


def verify(
    checkpoint: CheckpointArgument,
    device: DeviceOption = None,
    seed: Annotated[int, option("--seed", "N", "Seed of the random tokens that are run.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Repeat a conversion's checks on a local or downloaded checkpoint: files, weights, caches, KV bytes, logits.

    The exit code is 1 if a check fails. Checks that need missing entries of the report are listed as not checked.

    Examples:

        surgery verify ckpt-mla/

        surgery verify org/name-mla --json
    """
    from surgery.checkpoint.named_models import find_model

    checkpoint = find_model(checkpoint)

    from surgery.common.progress import Progress
    from surgery.console.checks import show_checks
    from surgery.inspection.checks import verify_checkpoint

    checked = verify_checkpoint(checkpoint, device=device or "auto", seed=seed, progress=Progress())
    show_checks(checked, as_json=as_json)
    if checked.failed:
        sys.stdout.flush()
        first = checked.failed[0]
        raise SurgeryError.at(checked.path, f"{first.name}: {first.message}")
