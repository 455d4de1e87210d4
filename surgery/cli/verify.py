"""``surgery verify``: a checkpoint held to its config and to the report of its conversion."""

from __future__ import annotations

import typer

from surgery.cli.options import CheckpointArgument, DeviceOption, JsonOption, PickleOption


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command()(verify)


def verify(
    checkpoint: CheckpointArgument,
    device: DeviceOption = None,
    allow_pickle: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check that a checkpoint is what its conversion wrote, and that it computes the same in every way it is run.

    Files by their digests, tensors by its config, then layer by layer: in pieces, in batches, KV bytes, logits.

    Of other checkpoints, and earlier conversions, what there is to check; exit code 1 if something is wrong.

    Examples:

        surgery verify ckpt-mla/

        surgery verify org/name-mla --json
    """
    from surgery.checkpoint.location import find_local
    from surgery.checkpoint.named_models import model_named

    source = model_named(checkpoint)
    find_local(source)  # refuses what is none before torch is loaded for it

    from surgery.common.progress import Progress
    from surgery.console.verification import show_verified
    from surgery.verification.checkpoint import verify_checkpoint

    verified = verify_checkpoint(source, device=device or "auto", allow_pickle=allow_pickle, progress=Progress())
    show_verified(verified, as_json=as_json)
    verified.raise_if_wrong()
