"""``surgery convert --dry-run``: the source checked as by a conversion, and what it would take; nothing is written."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from surgery.calibration.settings import NO_CALIBRATION
from surgery.calibration.texts import (
    RANDOM_LENGTH,
    RANDOM_SEQUENCES,
    RECALL_PROMPTS_PER_TEXT,
    load_texts,
    load_tokenizer,
)
from surgery.checkpoint import CheckpointWriter
from surgery.common.progress import Progress
from surgery.running.source import Source
from surgery.structures.converter import planned_tensors, replaced_names
from surgery.structures.mla.convert import check_request
from surgery.structures.mla.estimates import Workload, measure_speed
from surgery.structures.mla.forecast import Forecast, forecast
from surgery.structures.mla.settings import ConvertSettings

# The report, the card and the config: what is written beside weights and copied files.
REPORT_BYTES = 64 * 1024


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion would do; plain values only. Sizes in bytes, times in seconds.

    Attributes:
        source: path, shape, dtype, bytes of its weights.
        splits: the splits of the budget that would be tried, each with its KV bytes per token.
        kv: bytes per token of the source, and of the result (the largest of the splits).
        target: the class that carries the result, why, and the engines; ``frequencies_known`` says whether the engines
            are settled, or depend on the frequencies that the conversion will choose.
        tokens: sequences and lengths of calibration and held-out text.
        disk: bytes of the output and of temporary files, and what is free for each.
        memory: estimated peaks in the host's memory and the device's, with their largest parts.
        work: floating point operations by phase, the measured speed, and the estimated time.
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

    def to_dict(self) -> dict:
        return asdict(self)


def plan_conversion(
    source: str | Path,
    out: str | Path | None,
    settings: ConvertSettings,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> ConversionPlan:
    """Plans ``convert_to_mla`` with the same arguments, without any forward pass and without writing.

    Calibration text is read and tokenised, so that its faults show too; ``self`` samples, which take the whole model,
    are not drawn.

    Raises:
        SurgeryError: whatever the conversion would refuse before it computes.
    """
    opened, out, splits = check_request(source, out, settings, overwrite=overwrite, allow_pickle=allow_pickle)
    first = opened.anatomy(0)
    for layer in range(1, opened.layers):
        opened.anatomy(layer)  # refuses weights that are not finite
    forecasts = [forecast(opened, split, settings) for split in splits]
    chosen = max(forecasts, key=lambda found: found.kv_bytes_per_token)
    writer = chosen.carrier.writer
    tensors = planned_tensors(opened, replaced_names(opened, writer.copied), writer.plan)
    # Its constructor refuses what cannot be written (too little space, a size that is none) and writes nothing.
    CheckpointWriter(out, tensors, max_shard_size=settings.max_shard_size, overwrite=overwrite)

    tokens = _tokens(opened, settings)
    weights = sum(spec.nbytes for spec in tensors.values())
    work = Workload.of(opened, settings, splits, tokens, chosen.carrier)
    source_kv = first.kv_width * opened.layers * first.k.dtype.itemsize
    return ConversionPlan(
        source=_source_facts(opened, first),
        out=str(out),
        settings=settings.to_dict(),
        splits=[_split_facts(found) for found in forecasts],
        kv={
            "source_bytes_per_token": source_kv,
            "bytes_per_token": chosen.kv_bytes_per_token,
            "ratio": chosen.kv_bytes_per_token / source_kv,
        },
        target={
            "to": "mla",
            "method": settings.method,
            "model_type": "deepseek_v3" if chosen.carrier.stock else "surgery",
            "reasons": list(chosen.carrier.reasons),
            "frequencies_known": chosen.frequencies_known,
            "engines": chosen.engines,
        },
        tokens=tokens,
        disk=_disk(opened, out, weights, work),
        memory=work.memory(),
        work=work.estimate(measure_speed(opened.stream.device, opened.stream.dtype)),
    )


def _source_facts(opened: Source, first) -> dict:
    reader = opened.reader
    return {
        "path": str(reader.source),
        "dequantised_from": reader.dequantised_from,
        "model_type": reader.config["model_type"],
        "layers": opened.layers,
        "heads": first.heads,
        "kv_heads": first.kv_heads,
        "head_dim": first.head_dim,
        "hidden": first.hidden,
        "dtype": str(first.k.dtype).removeprefix("torch."),
        "weight_bytes": sum(reader.info(name).nbytes for name in reader.names()),
    }


def _split_facts(found: Forecast) -> dict:
    split = found.split
    facts = {"rope_dim": split.rope_dim, "rank": split.rank, "kv_bytes_per_token": found.kv_bytes_per_token}
    return {**facts, "fold": split.fold} if split.fold > 1 else facts


def _tokens(opened: Source, settings: ConvertSettings) -> dict[str, int]:
    """Sequences and lengths, counted in the text itself where that can be had without running the model."""
    length = min(settings.calibration_length, opened.config.max_position_embeddings)
    sequences = -(-settings.calibration_tokens // length)
    held_out, prompts = settings.held_out, RECALL_PROMPTS_PER_TEXT * settings.held_out
    if settings.calibration == NO_CALIBRATION:
        # A few random tokens stand in, to compare the logits of the written checkpoint on.
        length, sequences, held_out, prompts = RANDOM_LENGTH, 0, 0, RANDOM_SEQUENCES
    elif settings.calibration == "self":
        load_tokenizer(opened.reader.path)
    else:
        texts = load_texts(opened, settings, Progress(silent=True), run_source=False)
        sequences, length = texts.calibration.shape
        held_out, prompts = texts.held_out.texts, len(texts.held_out.answers)
    return {"length": length, "calibration": sequences, "held_out": held_out, "recall_prompts": prompts}


def _disk(opened: Source, out: Path, weights: int, work: Workload) -> dict[str, int]:
    temporary = Path(tempfile.gettempdir())
    beside = sum(path.stat().st_size for path in opened.reader.sidecars())
    return {
        "output_bytes": weights + beside + REPORT_BYTES,
        "output_free_bytes": _free(out.parent),
        "boundary_bytes": work.boundary_bytes,
        "statistics_bytes": work.statistics_bytes,
        "temporary_bytes": work.boundary_bytes + work.statistics_bytes,
        "temporary_free_bytes": _free(temporary),
        "temporary_folder": str(temporary),
    }


def _free(folder: Path) -> int:
    """Bytes free on the disk that will hold a folder, which need not exist yet; 0 if nobody can tell."""
    folder = folder.resolve()
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    with contextlib.suppress(OSError):
        return shutil.disk_usage(existing).free if existing else 0
    return 0
