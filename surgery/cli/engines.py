"""``surgery doctor``, the engines that load a checkpoint or facts on the machine, and ``surgery export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.options import CHECKPOINT, CheckpointArgument, JsonOption, flag, option
from surgery.common.errors import SurgeryError


def doctor(
    checkpoint: Annotated[str | None, typer.Argument(metavar="CKPT", help=f"{CHECKPOINT} [this machine]")] = None,
    gpu: Annotated[bool, flag("--gpu", "Without a checkpoint: list accelerators too; imports torch.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show which engines load a checkpoint, with which command and KV bytes, and why others do not.

    "Loads" means that a test of this project ran that kind of checkpoint there, or that the engine's own check accepts
    it. For stock MLA it also names weight and cache formats that ruin the checkpoint.

    Without a checkpoint: versions, cores and memory of this machine for a bug report; no paths, no names.

    Examples:

        surgery doctor ckpt-mla/

        surgery doctor --gpu
    """
    if checkpoint is None:
        from surgery.console.engines import show_machine

        show_machine(gpu=gpu, as_json=as_json)
        return
    if gpu:
        raise SurgeryError(f"--gpu checks this machine, not a checkpoint: remove --gpu or {checkpoint}")
    from surgery.checkpoint.named_models import find_model

    checkpoint = find_model(checkpoint)

    from surgery.console.engines import show_doctor
    from surgery.engines.table import diagnose
    from surgery.running.source_check import open_source

    open_source(checkpoint)
    show_doctor(diagnose(checkpoint), as_json=as_json)


def export(
    checkpoint: CheckpointArgument,
    engine: Annotated[str, option("--engine", "NAME", "llama.cpp: writes a GGUF.")],
    out: Annotated[Path | None, option("--out", "FILE", "File to write. [CKPT.gguf]")] = None,
    weights: Annotated[str, option("--weights", "bf16|f16|q8_0|f32", "Dtype of the large tensors.")] = "bf16",
    tokenizer_from: Annotated[
        Path | None,
        option(
            "--tokenizer-from",
            "FILE",
            "GGUF with the same tokens to take the tokenizer from. [the checkpoint's tokenizer]",
        ),
    ] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a checkpoint to the file format of an engine: GGUF for llama.cpp.

    Supports stock MLA with default RoPE and without biases, and Llama-class models.

    Example:

        surgery export ckpt-mla/ --engine llama.cpp --tokenizer-from source.gguf
    """
    from surgery.checkpoint.named_models import find_model, output_of

    checkpoint, out = find_model(checkpoint), output_of(checkpoint, out, ".gguf")

    from surgery.console.engines import show_export
    from surgery.export import export_checkpoint

    exported = export_checkpoint(
        checkpoint, engine, out, weights=weights, tokenizer_from=tokenizer_from, overwrite=overwrite
    )
    show_export(exported, as_json=as_json)
