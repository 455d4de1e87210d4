"""What all conversions have in common: how they begin, and how what they have written becomes a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from surgery.calibration.held_out import Score
from surgery.calibration.settings import ConversionSettings
from surgery.calibration.texts import Texts
from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec, verify_files
from surgery.checkpoint.carry_over import CARD, REPORT, copy_sidecars, copy_tensors
from surgery.checkpoint.output_place import settle_output
from surgery.common.progress import Progress
from surgery.engines import engine_table
from surgery.model import remote_code_files
from surgery.reporting.report import Report, SourceShape, build_report
from surgery.running.source import OwnSource, Source
from surgery.structures.quantized.stage import in_own_class, quantize_written
from surgery.structures.settings import StructureSettings
from surgery.verify.flow import Flow
from surgery.verify.written import Verification, verify_by_running


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
        target: what it became, for the report; "bytes_per_token" and "engines" are added here.
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
        shape: of the source, where it is no checkpoint of a family.
        flow: predicted peak and footprint of a prompt and decoded tokens, in the dtype in which layers run.
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
    shape: SourceShape | None = None
    flow: Callable[[int, int], Flow] | None = None


def open_request(
    source: str | Path,
    out: str | Path | None,
    target: str,
    settings: StructureSettings,
    *,
    overwrite: bool,
    allow_pickle: bool,
) -> tuple[Source, Path]:
    """Opens a checkpoint of a family and settles where the output goes.

    Raises:
        SurgeryError: the source cannot be converted, or the output exists and may not be replaced.
    """
    opened = Source.open(source, settings, allow_pickle=allow_pickle)
    return opened, settle_output(source, opened.reader.source, out, target + settings.suffix, overwrite=overwrite)


def unchanged_tensors(reader: CheckpointReader, config) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint but a copy of tied embeddings, which would only say the same again."""
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {
        name: TensorSpec(reader.info(name).dtype, reader.info(name).shape)
        for name in reader.names()
        if name not in tied
    }


def replaced_names(opened: Source, copied: Callable[[list[str]], Collection[str]]) -> dict[str, int]:
    """The source's tensors that a conversion does away with or writes anew, and their layers.

    ``copied`` says which of a layer's attention tensors stay as they are. A copy of tied embeddings goes too, of layer
    -1: loaders take the embeddings for it.
    """
    replaced = {"lm_head.weight": -1} if opened.config.tie_word_embeddings else {}
    for layer in range(opened.layers):
        names = opened.family.attention_names(opened.reader, layer)
        kept = set(copied(names))
        replaced |= {name: layer for name in names if name not in kept}
    return replaced


def planned_tensors(
    opened: Source, replaced: Mapping[str, int], plan: Callable[[int], Mapping[str, TensorSpec]]
) -> dict[str, TensorSpec]:
    """Every tensor of the output in the source's order, a layer's new attention ``plan(layer)`` where the old began."""
    tensors: dict[str, TensorSpec] = {}
    for name in opened.reader.names():
        if name not in replaced:
            info = opened.reader.info(name)
            tensors[name] = TensorSpec(info.dtype, info.shape)
        elif replaced[name] >= 0:
            tensors |= plan(replaced[name])
    return tensors


def finish(
    writer: CheckpointWriter,
    tensors: Mapping[str, TensorSpec],
    opened: Source | OwnSource,
    settings: StructureSettings,
    texts: Texts,
    outcome: Outcome,
    command: str,
    progress: Progress,
    *,
    verify: Callable[[Path, Outcome], Verification] | None = None,
) -> Report:
    """Writes what is not attention, checks and runs the result, reports on it, and gives it its final name.

    Args:
        writer: has every new tensor of the attention.
        tensors: what was planned to be written.
        settings: with ``bits``, what was written becomes the project's own class with a quantised cache.
        verify: runs what was written; by default :func:`surgery.verify.written.verify_by_running`.

    Raises:
        SurgeryError: the written files are not what was planned, or do not compute what was simulated.
    """
    kept = [name for name in opened.reader.names() if name not in outcome.replaced]
    if settings.quantizes:
        outcome = in_own_class(outcome)
    code = remote_code_files() if outcome.own_class else ()
    write_rest(writer, tensors, opened.reader, outcome.config, kept, progress, factors=outcome.factors, code=code)
    if settings.quantizes:
        outcome, verification = quantize_written(writer, opened, outcome, texts.held_out, settings, progress)
    elif verify is None:
        verification = verify_by_running(
            writer.partial,
            opened.weight_dtype,
            opened.stream,
            outcome.simulated,
            texts.held_out,
            opened.windows,
            outcome.kv_bytes,
            settings.batch_size,
            progress,
            blocks=outcome.groups,
            flow=outcome.flow,
        )
    else:
        verification = verify(writer.partial, outcome)
    return conclude(writer, opened, settings, texts, outcome, verification, command, progress)


def write_rest(
    writer: CheckpointWriter,
    tensors: Mapping[str, TensorSpec],
    reader: CheckpointReader,
    config: dict[str, Any],
    kept: Sequence[str],
    progress: Progress,
    *,
    factors: Mapping[str, float] | None = None,
    code: Iterable[Path] = (),
) -> None:
    """Writes what is not attention: the tensors ``kept``, config.json and the files beside the weights.

    Raises:
        SurgeryError: the written files are not what was planned.
    """
    copy_tensors(reader, kept, factors or {}, writer, progress)
    writer.write_json("config.json", config)
    copy_sidecars(reader, code, writer)
    writer.finish()
    verify_files(writer.partial, tensors)


def conclude(
    writer: CheckpointWriter,
    opened: Source | OwnSource,
    settings: ConversionSettings,
    texts: Texts,
    outcome: Outcome,
    verification: Verification,
    command: str,
    progress: Progress,
) -> Report:
    """Reports on what was written and verified, and gives it its final name."""
    predicted = outcome.kv_bytes(verification.kv_tokens) / verification.kv_tokens
    engines = engine_table(outcome.final_config or outcome.config, writer.out.name)
    report = build_report(
        opened,
        settings,
        command,
        {**outcome.target, "bytes_per_token": predicted, "engines": engines},
        outcome.splits,
        texts,
        outcome.scores,
        outcome.layers,
        verification,
        progress,
        shape=outcome.shape,
    )
    if outcome.final_config is not None:
        writer.write_json("config.json", outcome.final_config)
        for path in outcome.final_code:
            writer.copy_file(path, path.name)
    writer.write_json(REPORT, report.to_dict())
    writer.write_text(CARD, report.card(writer.out.name))
    writer.commit()
    return report
