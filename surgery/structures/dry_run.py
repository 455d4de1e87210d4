"""``--dry-run``: checks of a conversion and its expected cost, without any computation or output."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from surgery.architectures.multimodal import whole_config
from surgery.calibration.settings import NO_CALIBRATION, ConversionSettings
from surgery.calibration.texts import NO_TOKENIZER, RANDOM_LENGTH, RANDOM_SEQUENCES, RECALL_PROMPTS_PER_TEXT, load_texts
from surgery.checkpoint import CheckpointWriter
from surgery.checkpoint.disk import free_bytes
from surgery.checkpoint.layout import CONFIG, WEIGHTS
from surgery.checkpoint.safetensors_format import encode_header
from surgery.checkpoint.staging import NoSpace
from surgery.common.lineage import REPORT
from surgery.common.progress import Progress
from surgery.families.base import head_shape
from surgery.running.kv_bytes import kv_shares
from surgery.running.models import tokenizer_of
from surgery.running.source import OwnSource, Source, is_absent
from surgery.structures.base import Structure
from surgery.structures.estimates import NoMemory, Workload
from surgery.structures.kept_layers import converted_layers
from surgery.structures.kv_bytes import source_kv_bytes
from surgery.structures.registry import target_of
from surgery.structures.request import ConversionRequest, open_request

# Report, model card and config, which are written next to weights and copied files.
REPORT_BYTES = 64 * 1024


@dataclass(frozen=True)
class ConversionPlan:
    """Result of a dry run, as plain values. Sizes in bytes, times in seconds.

    Attributes:
        kv: KV bytes per token of the source and of the result; if several splits of the budget are tried, the most.
        target: target class, reasons for it, and engines; ``frequencies_known``: whether these are known already.
        disk: bytes of the output and of temporary files next to it, and the free space.
        work: floating point operations, measured speed and estimated time; no time for a device that is not present.
        refusal: error that would end a valid conversion on this machine: too small a disk or memory. None if there is
            none.
    """

    source: dict
    out: str
    settings: dict
    kv: dict
    target: dict
    tokens: dict
    disk: dict
    memory: dict
    work: dict
    refusal: str | None

    def to_dict(self) -> dict:
        return asdict(self)


def plan_conversion(
    source: str | Path,
    out: str | Path | None,
    settings: ConversionSettings,
    *,
    overwrite: bool = False,
    outline: Path | None = None,
) -> ConversionPlan:
    """Plan a conversion with these arguments, without running the model and without writing the result.

    Calibration text is read to find errors in it; ``self`` samples, which need the whole model, are not drawn.
    ``outline`` is a folder for a checkpoint of the result's shapes (:func:`outline_result`), from which
    later dry runs can start. Raises SurgeryError as the conversion would before it computes, except for too small a
    disk or memory.
    """
    silent, absent = Progress(silent=True), is_absent(settings.device)
    here = replace(settings, device="cpu") if absent else settings
    structure, out = open_request(ConversionRequest(source, out, here, overwrite), silent)
    opened, forecast = structure.opened, structure.forecast()
    if isinstance(opened, Source):
        for layer in converted_layers(opened.stateful, opened.layers):
            opened.anatomy(layer)  # raises for weights that are not finite
    tokens = _tokens(opened, settings)
    weights = sum(spec.nbytes for spec in forecast.tensors.values())
    work, refusal = Workload.of(opened, settings, tokens, forecast.demand), None
    try:  # the constructor checks the output and writes nothing
        CheckpointWriter(out, forecast.tensors, max_shard_size=settings.max_shard_size, overwrite=overwrite)
        work.check_memory()
    except (NoSpace, NoMemory) as error:
        refusal = str(error)
    if absent:
        work, speed = replace(work, on_host=False), None
    else:
        speed = measure_speed(opened.stream.device, opened.stream.dtype)
    config = forecast.config
    config_values = whole_config(opened.reader, config)
    if outline is not None:
        outline_result(outline, structure)
    source_kv, kv = source_kv_bytes(opened), forecast.kv_bytes_per_token
    limit, dtype = opened.config.max_position_embeddings, opened.weight_dtype
    shares = kv_shares(config, dtype, opened.reader.config, dtype, limit)
    return ConversionPlan(
        source=_source_facts(opened),
        out=str(out),
        settings=settings.to_dict(),
        kv={"source_bytes_per_token": source_kv, "bytes_per_token": kv, "ratio": kv / source_kv, "ratio_at": shares},
        target={
            "to": target_of(settings).name,
            "method": getattr(settings, "method", None),
            "model_type": config_values["model_type"],
            "reasons": forecast.reasons,
            "frequencies_known": forecast.settled,
            "engines": forecast.engines_of(opened.reader, config),
        },
        tokens=tokens,
        disk=_disk(opened, out, weights, work),
        memory=work.memory(),
        work=work.estimate(speed),
        refusal=refusal,
    )


def outline_result(folder: Path, structure: Structure) -> None:
    """Write a checkpoint of the result's shapes with zero weights in a sparse file, for checks that need only shapes.

    It has the source's sidecars but its report, which describes other weights. A no-op for a vision-language source.
    """
    reader, forecast = structure.opened.reader, structure.forecast()
    if reader.stored_names:
        return
    folder.mkdir(parents=True)
    for path in reader.sidecars():
        if path.name != REPORT:
            target = folder / path.relative_to(reader.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    (folder / CONFIG).write_text(json.dumps(whole_config(reader, forecast.config)), encoding="utf-8")
    header, _ = encode_header(forecast.tensors, {"format": "pt"})
    with open(folder / WEIGHTS, "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(spec.nbytes for spec in forecast.tensors.values()))


def _source_facts(opened: Source | OwnSource) -> dict:
    reader, (heads, kv_heads, head_dim) = opened.reader, head_shape(opened.config)
    return {
        "path": str(reader.source),
        "dequantised_from": reader.dequantised_from,
        "model_type": reader.config["model_type"],
        "layers": opened.layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "hidden": opened.config.hidden_size,
        "dtype": str(opened.weight_dtype).removeprefix("torch."),
        "weight_bytes": sum(reader.info(name).nbytes for name in reader.names()),
    }


def _tokens(opened: Source | OwnSource, settings: ConversionSettings) -> dict[str, int]:
    """Count the sequences and their length, in the text itself unless the model would have to generate it."""
    if settings.calibration == "self":
        tokenizer_of(opened.reader, remedy=NO_TOKENIZER)
    elif settings.calibration != NO_CALIBRATION:
        return load_texts(opened, settings, Progress(silent=True), run_source=False).counts()
    return requested_tokens(opened, settings)


def requested_tokens(opened: Source | OwnSource, settings: ConversionSettings) -> dict[str, int]:
    """Return the number and length of the sequences by the settings alone, before any text is read."""
    if settings.calibration == NO_CALIBRATION:
        # Random tokens replace text, to compare the logits of the written checkpoint.
        return {"length": RANDOM_LENGTH, "calibration": 0, "held_out": 0, "recall_prompts": RANDOM_SEQUENCES}
    length = min(settings.calibration_length, opened.config.max_position_embeddings)
    return {
        "length": length,
        "calibration": -(-settings.calibration_tokens // length),
        "held_out": settings.held_out,
        "recall_prompts": RECALL_PROMPTS_PER_TEXT * settings.held_out,
    }


def _disk(opened: Source | OwnSource, out: Path, weights: int, work: Workload) -> dict[str, Any]:
    return {
        "output_bytes": weights + sum(path.stat().st_size for path in opened.reader.sidecars()) + REPORT_BYTES,
        "temporary_bytes": work.temporary_bytes,
        "temporary_folder": f"{out}.partial",
        "free_bytes": free_bytes(out.parent),
    }


BENCHMARK_SIZE, BENCHMARK_SECONDS = 1024, 0.15


@cache
def measure_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the floating point operations per second of a large matrix product, once per process."""
    matrix = torch.ones(BENCHMARK_SIZE, BENCHMARK_SIZE, device=device, dtype=dtype)

    def synchronize() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    _ = matrix @ matrix
    synchronize()
    start, runs = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < BENCHMARK_SECONDS or not runs:
        _ = matrix @ matrix
        synchronize()
        runs += 1
    return 2 * BENCHMARK_SIZE**3 * runs / elapsed
