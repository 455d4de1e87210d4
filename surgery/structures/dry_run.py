"""``--dry-run``: the source checked as by a conversion, and what it would take; nothing is written."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch

from surgery.architectures.multimodal import whole_config
from surgery.calibration.settings import NO_CALIBRATION, ConversionSettings
from surgery.calibration.texts import (
    NO_TOKENIZER,
    RANDOM_LENGTH,
    RANDOM_SEQUENCES,
    RECALL_PROMPTS_PER_TEXT,
    load_texts,
)
from surgery.checkpoint import CheckpointWriter
from surgery.checkpoint.disk import free_bytes
from surgery.checkpoint.outline import write_outline
from surgery.checkpoint.staging import NoSpace
from surgery.checkpoint.writer import in_parts
from surgery.common.progress import Progress
from surgery.families.base import head_shape
from surgery.running.kv_bytes import kv_shares
from surgery.running.models import tokenizer_of
from surgery.running.source import OwnSource, Source, is_absent
from surgery.structures.base import Structure
from surgery.structures.estimates import Workload
from surgery.structures.kept_layers import converted_layers
from surgery.structures.kept_matrices import kept_matrices
from surgery.structures.kv_bytes import source_kv_bytes
from surgery.structures.registry import target_of
from surgery.structures.request import ConversionRequest, open_request

# The report, the card and the config: what is written next to weights and copied files.
REPORT_BYTES = 64 * 1024


@dataclass(frozen=True)
class ConversionPlan:
    """Dry run of a conversion, as plain values. Sizes in bytes, times in seconds.

    Attributes:
        source: path, shape, dtype, bytes of its weights.
        splits: the splits of the budget that would be tried, each with its KV bytes per token (MLA).
        kv: bytes per token of the source, and of the result (the largest of the splits).
        target: the class that carries the result, why, and the engines; ``frequencies_known`` says whether the engines
            are settled, or depend on the frequencies that the conversion will choose.
        tokens: sequences and lengths of calibration and held-out text.
        disk: bytes of the output and of temporary files, and what is free for each.
        memory: estimated peaks in the host's memory and the device's, with their largest parts.
        work: floating point operations, the measured speed, and the estimated time; no time for a device that is not
            here.
        refusal: what the conversion would end in here and now, though all that was asked is right: too small a disk.
    """

    source: dict
    out: str
    settings: dict
    splits: list[dict]
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
    allow_pickle: bool = False,
    outline: Path | None = None,
) -> ConversionPlan:
    """Plans a conversion of the same arguments, without any forward pass and without writing.

    Calibration text is read and tokenized, so that its faults show too; ``self`` samples, which take the whole model,
    are not drawn. Of a device that is not here, such as "cuda" on a laptop, the memory is reported and no time.

    Args:
        outline: folder for a checkpoint of the result's shapes (:mod:`surgery.checkpoint.outline`), from which dry runs
            of what is to be done with the result go on; none is made of a vision-language model.

    Raises:
        SurgeryError: whatever the conversion would refuse before it computes, but too small a disk.
    """
    silent, absent = Progress(silent=True), is_absent(settings.device)
    here = replace(settings, device="cpu") if absent else settings
    structure, out = open_request(ConversionRequest(source, out, here, overwrite, allow_pickle), silent)
    opened, forecast = structure.opened, structure.forecast()
    if isinstance(opened, Source):
        for layer in converted_layers(opened.stateful, opened.layers):
            opened.anatomy(layer)  # refuses weights that are not finite
    parts = kept_matrices(opened.reader, settings, forecast.tensors)
    refusal = None
    try:  # its constructor refuses what cannot be written and writes nothing
        asked_of_files = {"max_shard_size": settings.max_shard_size, "overwrite": overwrite, "parts": parts}
        CheckpointWriter(out, forecast.tensors, **asked_of_files)
    except NoSpace as error:
        refusal = str(error)

    tokens = _tokens(opened, settings)
    files = in_parts(forecast.tensors, parts)
    weights = sum(spec.nbytes for spec in files.values())
    work = Workload.of(opened, settings, tokens, forecast.demand)
    if absent:
        work, speed = replace(work, on_host=False), {"flops_per_second": None}
    else:
        speed = measure_speed(opened.stream.device, opened.stream.dtype)
    config = forecast.config
    config_values = whole_config(opened.reader, config)
    if outline is not None:
        outline_result(outline, structure, settings)
    source_kv, kv = source_kv_bytes(opened), forecast.kv_bytes_per_token
    limit, dtype = opened.config.max_position_embeddings, opened.weight_dtype
    shares = kv_shares(config, dtype, opened.reader.config, dtype, limit)
    return ConversionPlan(
        source=_source_facts(opened),
        out=str(out),
        settings=settings.to_dict(),
        splits=forecast.splits,
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


def outline_result(folder: Path, structure: Structure, settings: ConversionSettings) -> None:
    """Writes a checkpoint of the result's shapes; none where the source is a vision-language model."""
    reader, forecast = structure.opened.reader, structure.forecast()
    if not reader.stored_names:
        files = in_parts(forecast.tensors, kept_matrices(reader, settings, forecast.tensors))
        write_outline(folder, reader, whole_config(reader, forecast.config), files)


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
    """Sequences and lengths, counted in the text itself where that can be had without running the model."""
    if settings.calibration == "self":
        tokenizer_of(opened.reader, remedy=NO_TOKENIZER)
    elif settings.calibration != NO_CALIBRATION:
        return load_texts(opened, settings, Progress(silent=True), run_source=False).counts()
    return requested_tokens(opened, settings)


def requested_tokens(opened: Source | OwnSource, settings: ConversionSettings) -> dict[str, int]:
    """Sequences and lengths that the settings ask for, before any text is read."""
    if settings.calibration == NO_CALIBRATION:
        # A few random tokens stand in, to compare the logits of the written checkpoint on.
        return {"length": RANDOM_LENGTH, "calibration": 0, "held_out": 0, "recall_prompts": RANDOM_SEQUENCES}
    length = min(settings.calibration_length, opened.config.max_position_embeddings)
    return {
        "length": length,
        "calibration": -(-settings.calibration_tokens // length),
        "held_out": settings.held_out,
        "recall_prompts": RECALL_PROMPTS_PER_TEXT * settings.held_out,
    }


def _disk(opened: Source | OwnSource, out: Path, weights: int, work: Workload) -> dict[str, int]:
    beside = sum(path.stat().st_size for path in opened.reader.sidecars())
    free = free_bytes(out.parent)
    return {
        "output_bytes": weights + beside + REPORT_BYTES,
        "output_free_bytes": free,
        "boundary_bytes": work.boundary_bytes,
        "statistics_bytes": work.statistics_bytes,
        "spilled_bytes": work.spilled_bytes,
        "temporary_bytes": work.boundary_bytes + work.statistics_bytes + work.spilled_bytes,
        "temporary_free_bytes": free,
        "temporary_folder": f"{out}.partial",
    }


BENCHMARK_SIZE, BENCHMARK_SECONDS = 1024, 0.15


def measure_speed(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Floating point operations per second of a large matrix product on the device."""
    return {"flops_per_second": _matmul_speed(device, dtype)}


@cache
def _matmul_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Measured once in a process: dry runs of many targets ask for it."""
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
