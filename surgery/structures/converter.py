"""Steps that every conversion runs.

1. Open the source, check everything that needs no computation, and read the texts.
2. The structure gathers statistics, allocates its budget and converts the layers.
3. Copy all tensors outside attention; reload the written files, run them and compare them with the simulation.
4. Write the report and move the output to its final path.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from surgery.architectures.custom_class import with_auto_map
from surgery.architectures.multimodal import whole_config, whole_names
from surgery.calibration.texts import load_texts
from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec, verify_files
from surgery.checkpoint.carried_files import CarriedFiles
from surgery.checkpoint.carry_over import copy_sidecars, copy_tensors
from surgery.checkpoint.disk import read_json
from surgery.checkpoint.file_hashes import hash_files
from surgery.checkpoint.file_kinds import CARD, CONFIG, REPORT, list_files
from surgery.checkpoint.hub import id_of_snapshot
from surgery.checkpoint.unfinished import Unfinished
from surgery.common.ownership import inventory
from surgery.common.phase import peak_memory
from surgery.common.progress import Progress
from surgery.engines.number_formats import ruinous_formats
from surgery.engines.table import engine_table
from surgery.model import remote_code_files
from surgery.reporting.adapters import adapter_targets
from surgery.reporting.quality import useless_layers
from surgery.reporting.report import Report, SourceShape, environment, previous_report
from surgery.running.kv_bytes import kv_bytes_of, kv_shares
from surgery.running.moment_precision import factorizing_on
from surgery.structures.base import Outcome, Structure
from surgery.structures.context import ConversionContext
from surgery.structures.estimates import Workload
from surgery.structures.registry import TARGETS
from surgery.structures.request import ConversionRequest, open_request
from surgery.verification.written import Verification
from surgery.version import __version__

STEPS = 6
"""Progress steps: texts, statistics, budget, layers, writing and verification, report."""


@dataclass(frozen=True)
class Conversion:
    """Finished conversion: output folder, report, and the source as the request named it."""

    path: Path
    report: Report
    source: str


def convert(request: ConversionRequest, *, progress: Progress | None = None) -> Conversion:
    """Convert a checkpoint and write the result as a Hugging Face checkpoint.

    An interrupted conversion resumes from ``<out>.partial`` with a bitwise identical result. ``progress`` is silent if
    None. Raises SurgeryError: bad input or an impossible request; no files are left.
    """
    settings, progress = request.settings, progress or Progress(silent=True)
    structure, out = open_request(request, progress)
    if stored := structure.opened.reader.dequantised_from:
        dtype = str(structure.opened.weight_dtype).removeprefix("torch.")
        progress.note(f"{stored} weights are dequantized to {dtype}")
    if left_out := structure.opened.reader.left_out:
        progress.note(f"skipped: {len(left_out)} tensors that the model class does not load, first {left_out[0]}")
    with ExitStack() as stack:
        stack.enter_context(factorizing_on(structure.opened.stream.device))
        carried = stack.enter_context(CarriedFiles.of(structure.opened.reader, keep_code=request.keep_code))
        with progress.step(1, STEPS):
            texts = load_texts(structure.opened, settings, progress)
        forecast = structure.forecast()
        workload = Workload.of(structure.opened, settings, texts.counts(), forecast.demand)
        workload.check_memory()
        progress.expect(workload.phase_flops())
        facts = {"texts": texts.hashes(), "version": __version__, "settings": settings.to_dict()}
        modes = {"overwrite": request.overwrite, "restart": request.restart}
        with progress.step(1, STEPS):
            unfinished = stack.enter_context(Unfinished(out, structure.opened.reader, facts, progress, **modes))
        staging = unfinished.staging
        # The writer checks again once the tensors are final, but that may be hours from here.
        staging.check_space(sum(spec.nbytes for spec in forecast.tensors.values()))
        work = ConversionContext.in_folder(unfinished.snapshots, structure.opened, settings, texts, progress)
        with progress.step(2, STEPS):
            structure.gather(work)
        with progress.step(3, STEPS):
            tensors = structure.plan(work)
        options = {"max_shard_size": settings.max_shard_size, "staging": staging}
        options["stored_names"] = whole_names(structure.opened.reader, forecast.config, tensors)
        with CheckpointWriter(out, tensors, **options) as writer:
            with progress.step(4, STEPS):
                outcome = structure.convert_layers(work, writer)
            with progress.step(5, STEPS):
                verification = _finish(structure, work, writer, carried, outcome)
            if request.predicted is not None:
                outcome = replace(outcome, target={**outcome.target, "predicted": dict(request.predicted)})
            with progress.step(6, STEPS):
                report = _conclude(work, writer, carried, outcome, verification, request.command)
    return Conversion(writer.out, report, str(request.source))


def _finish(
    structure: Structure,
    work: ConversionContext,
    writer: CheckpointWriter,
    carried: CarriedFiles,
    outcome: Outcome,
) -> Verification:
    """Write all tensors and files outside attention, then check and run the result.

    Raises SurgeryError: the written files differ from the plan, or their outputs from the simulation.
    """
    reader = work.opened.reader
    copy_tensors(reader, writer.missing(), outcome.factors, writer, work.progress)
    config, code = whole_config(reader, outcome.config), ()
    if outcome.custom_class:
        code = remote_code_files(whole_config(reader, with_auto_map(outcome.config))["auto_map"])
    writer.write_json(CONFIG, config)
    copy_sidecars(reader, carried, code, writer)
    if left_out := carried.record([path.name for path in code])["left_out"]:
        work.progress.note(f"files not copied to the output: {', '.join(left_out)}")
    writer.finish()
    verify_files(writer.partial, writer.stored_plan)
    return structure.verify(work, writer.partial, outcome)


def _conclude(
    work: ConversionContext,
    writer: CheckpointWriter,
    carried: CarriedFiles,
    outcome: Outcome,
    verification: Verification,
    command: str,
) -> Report:
    """Write the report and model card of the verified result, and move it to its final path.

    Raises SurgeryError: the source has changed since the conversion began.
    """
    work.opened.reader.check_unchanged()
    if ruined := ruinous_formats(CheckpointReader.open(writer.partial)):
        outcome = replace(outcome, target={**outcome.target, "ruined_by": ruined})
    if useless := useless_layers(outcome.layers):
        outcome = replace(outcome, target={**outcome.target, "useless_layers": useless})
    report = build_report(work, outcome, verification, writer.out.name, writer.plan, command)
    config = read_json(writer.partial / CONFIG)
    if (own := carried.own_config(config, list_files(writer.partial))) != config:
        writer.write_json(CONFIG, own)
    files = hash_files(writer.partial, work.progress)
    report = replace(report, previous=previous_report(carried.folder), files=files, source_files=carried.record(files))
    writer.write_text(CARD, report.card(writer.out.name))
    report = replace(report, other_files=inventory(writer.partial, [*report.files, REPORT]))
    writer.write_json(REPORT, report.to_dict())
    writer.commit()
    return report


def build_report(
    work: ConversionContext,
    outcome: Outcome,
    verification: Verification,
    name: str,
    plan: Mapping[str, TensorSpec],
    command: str,
) -> Report:
    """Build the report of a conversion whose files are written and verified, without their names and hashes.

    ``name`` is that of the output folder, for the commands of engines; ``plan`` has the specs of all written tensors.
    """
    opened, reader, progress = work.opened, work.opened.reader, work.progress
    shape, hub = outcome.shape or SourceShape.of(opened), id_of_snapshot(reader.source)
    predicted, at = kv_bytes_of(outcome.config, opened.weight_dtype), verification.kv_tokens
    stages = [{"stage": stage, **asdict(score)} for stage, score in outcome.scores.items()]
    stages.append({"stage": "reloaded", **asdict(verification.score)})
    return Report(
        source={
            "path": hub[0].partition("/")[2] if hub else reader.source.name,
            **({"hub": hub[0], "revision": hub[1]} if hub else {}),
            "dequantised_from": reader.dequantised_from,
            "sha256": reader.fingerprint(),
            "model_type": reader.config["model_type"],
            "layers": opened.layers,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "dtype": str(shape.dtype).removeprefix("torch."),
        },
        target=_target(work, outcome, name)
        | {"adapters": adapter_targets({name: spec.shape for name, spec in plan.items()})},
        settings=work.settings.to_dict(),
        command=command,
        calibration=work.texts.description,
        kv={
            "source_bytes_per_token": shape.kv_bytes_per_token,
            "predicted_bytes_per_token": predicted(at) / at,
            "measured_bytes_per_token": verification.kv_bytes_per_token,
            "measured_at_tokens": at,
            "ratio": verification.kv_bytes_per_token / shape.kv_bytes_per_token,
            "ratio_at": kv_shares(
                outcome.config, opened.weight_dtype, reader.config, shape.dtype, opened.config.max_position_embeddings
            ),
        },
        splits=outcome.splits,
        ladder=stages,
        layers=outcome.layers,
        verification={
            "logit_difference_to_simulation": verification.logit_difference,
            "cached_decode_difference": verification.cache_difference,
        },
        environment=environment(),
        seconds={name: round(seconds, 2) for name, seconds in progress.seconds.items()},
        peak_memory_bytes=peak_memory(),
        probe=verification.probe,
        phase_peak_bytes=dict(progress.peaks),
        phase_flops={name: flops for name, flops in progress.expected.items() if name in progress.seconds},
    )


def _target(work: ConversionContext, outcome: Outcome, name: str) -> dict:
    """Build the report's entry of the target: name, class and the engines that load it."""
    # By the outcome's name, not the settings: a slice keeps its source's target, and kv_heads decides gqa or mqa.
    target, to = TARGETS.get(outcome.target["to"]), outcome.target["to"]
    config = whole_config(work.opened.reader, outcome.config)
    return {
        **outcome.target,
        "model_type": config["model_type"],
        "called": getattr(target, "called", to),
        "engines": engine_table(config, name, work.opened.reader.path),
    }
