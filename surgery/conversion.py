"""What all conversions have in common: how they begin, and how what they have written becomes a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from surgery.carry_over import CARD, REPORT, copy_sidecars, copy_tensors
from surgery.checkpoint import CheckpointWriter, TensorSpec, check_output, verify_files
from surgery.errors import SurgeryError
from surgery.held_out import Score
from surgery.model import remote_code_files
from surgery.progress import Progress
from surgery.report import Report, build_report
from surgery.settings import ConversionSettings
from surgery.source import Source
from surgery.texts import Texts
from surgery.verification import verify_by_running


@dataclass(frozen=True)
class Conversion:
    """A finished conversion: where it is and what is known of it."""

    path: Path
    report: Report


@dataclass(frozen=True)
class Outcome:
    """What a conversion has to say once every layer's new tensors are written.

    Attributes:
        config: the config.json of the result.
        replaced: names of the source's tensors that are not copied.
        target: what it became, for the report; "dtype" and "bytes_per_token" are added here.
        kv_bytes: predicted bytes of the caches of all layers, of one sequence by its tokens.
        layers: a dataclass a layer for the report, with the errors of each stage as ``measured``.
        scores: loss and recall after each stage.
        simulated: final hidden states [N, T, D] of the last stage on the held-out text.
        factors: by which copied tensors are multiplied.
        groups: first layer, and the one after the last, of layers that only run together; single layers by default.
        own_class: whether the model class's files have to travel with it.
        final_config: config.json of another class for the same tensors, written once the result is verified as
            ``config`` says; ``final_code``: files that it needs beside the weights.
        splits: of the budget that were tried, with their held-out losses.
    """

    config: dict[str, Any]
    replaced: Collection[str]
    target: dict[str, Any]
    kv_bytes: Callable[[int], float]
    layers: list[Any]
    scores: dict[str, Score]
    simulated: Tensor
    factors: Mapping[str, float] = field(default_factory=dict)
    groups: list[tuple[int, int]] | None = None
    own_class: bool = False
    final_config: dict[str, Any] | None = None
    final_code: tuple[Path, ...] = ()
    splits: list[dict[str, Any]] = field(default_factory=list)


def default_output(source: str | Path, target: str) -> Path:
    """Beside the source, its name with the target behind it; beside the working folder for a hub id."""
    path = Path(source)
    return path.parent / f"{path.name}-{target}" if path.is_dir() else Path(f"{path.name}-{target}")


def open_request(
    source: str | Path,
    out: str | Path | None,
    target: str,
    settings: ConversionSettings,
    *,
    overwrite: bool,
    allow_pickle: bool,
) -> tuple[Source, Path]:
    """Opens the source and settles where the output goes.

    Raises:
        SurgeryError: the source cannot be converted, or the output exists and may not be replaced.
    """
    opened = Source.open(source, settings, allow_pickle=allow_pickle)
    out = Path(out) if out else default_output(source, target)
    check_output(opened.reader.path, out)
    if (out.exists() or out.is_symlink()) and not overwrite:
        raise SurgeryError(f"{out}: exists; choose another --out or pass --overwrite")
    return opened, out


def finish(
    writer: CheckpointWriter,
    tensors: Mapping[str, TensorSpec],
    opened: Source,
    settings: ConversionSettings,
    texts: Texts,
    outcome: Outcome,
    command: str,
    progress: Progress,
) -> Report:
    """Writes what is not attention, checks and runs the result, reports on it, and gives it its final name.

    Args:
        writer: has every new tensor of the attention.
        tensors: what was planned to be written.

    Raises:
        SurgeryError: the written files are not what was planned, or do not compute what was simulated.
    """
    kept = [name for name in opened.reader.names() if name not in outcome.replaced]
    copy_tensors(opened.reader, kept, outcome.factors, writer, progress)
    writer.write_json("config.json", outcome.config)
    copy_sidecars(opened.reader, remote_code_files() if outcome.own_class else (), writer)
    writer.finish()
    verify_files(writer.partial, tensors)
    verification = verify_by_running(
        writer.partial,
        opened.anatomy(0).q.dtype,
        opened.stream,
        outcome.simulated,
        texts.held_out,
        tuple(opened.family.window(opened.config, layer) for layer in range(opened.layers)),
        outcome.kv_bytes,
        settings.batch_size,
        progress,
        blocks=outcome.groups,
    )
    predicted = outcome.kv_bytes(verification.kv_tokens) / verification.kv_tokens
    report = build_report(
        opened,
        settings,
        command,
        {**outcome.target, "bytes_per_token": predicted},
        outcome.splits,
        texts,
        outcome.scores,
        outcome.layers,
        verification,
        progress,
    )
    if outcome.final_config is not None:
        writer.write_json("config.json", outcome.final_config)
        for path in outcome.final_code:
            writer.copy_file(path, path.name)
    writer.write_json(REPORT, report.to_dict())
    writer.write_text(CARD, report.card(writer.out.name))
    writer.commit()
    return report
