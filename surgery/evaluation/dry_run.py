"""``surgery eval --dry-run``: forecast of an evaluation's measurements, memory and outputs, without running a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.evaluation.models import Checkpoint
from surgery.evaluation.preparation import EvaluationRequest, prepare
from surgery.evaluation.rows import plan_variants
from surgery.evaluation.store import ResultStore
from surgery.families import FAMILIES, LATENT_FAMILIES
from surgery.running.kv_bytes import KVBytes, kv_bytes_of
from surgery.running.source import checked_device, is_absent
from surgery.running.unfused import unfused


@dataclass(frozen=True)
class EvaluationPlan:
    """Dry run of an evaluation, as plain values. Sizes in bytes.

    Attributes:
        rows: models, the baseline first: name, role, path, dtype, bytes of the ``weights`` in the widest dtype of a
            measurement, of the ``cache`` of a batch of windows, and of one sequence's cache (``kv``) at ``context``
            tokens in the checkpoint's dtype; None for families without a prediction.
        variants: names of cheap baselines, which are measured like models; ``notes``: why others are left out.
        settings: settings of the evaluation, with the resolved text, context, dtype and device.
        resumes: whether the folder has results already.
    """

    rows: list[dict[str, Any]]
    variants: list[str]
    notes: list[str]
    tasks: list[str]
    settings: dict[str, Any]
    out: str
    resumes: bool


def plan_evaluation(request: EvaluationRequest, progress: Progress) -> EvaluationPlan:
    """Plan an evaluation; weights are hashed and texts tokenized, to find errors in them.

    The device may be absent from this machine. Raises SurgeryError: the evaluation would raise it before its first
    measurement.
    """
    device_name = request.settings.device
    device = torch.device(device_name).type if is_absent(device_name) else checked_device(device_name).type
    prepared = prepare(request, progress)
    settings, tasks, baseline = prepared.settings, prepared.tasks, prepared.baseline
    ResultStore.check(prepared.out)
    if not request.overwrite:
        prepared.check_report()
    quality = settings.quality_dtype(device)

    def dtype(checkpoint: Checkpoint, *, native: bool) -> torch.dtype:
        return getattr(torch, checkpoint.dtype if native or quality == "auto" else quality)

    def row(row) -> dict[str, Any]:
        checkpoint, reader = row.checkpoint, row.checkpoint.reader
        dtypes = {native: dtype(checkpoint, native=native) for native in (False, True)}
        sizes = {native: _kv_bytes_of(reader, dtypes[native]) for native in dtypes}
        has_sizes = all(sizes.values())
        widest = max(dtypes[task.native].itemsize for task in tasks.all)
        return {
            "name": row.name,
            "role": row.role,
            "path": checkpoint.source_name,
            "dtype": checkpoint.dtype,
            "weights": _num_elements(reader) * widest,
            "cache": sizes[False](tasks.length, settings.batch_size) if has_sizes else None,
            "kv": sizes[True](tasks.context) if has_sizes else None,
        }

    rows = [row(each) for each in prepared.rows]
    variants, notes = [], []
    if baseline is not None and settings.variants:
        ratios = [each["kv"] / rows[0]["kv"] for each in rows[1:] if each["kv"] and rows[0]["kv"]]
        variants, notes = plan_variants(settings.variants, baseline.checkpoint, ratios, tasks.context)
    return EvaluationPlan(
        rows=rows,
        variants=[each.name for each in variants],
        notes=notes,
        tasks=[task.name for task in tasks.all],
        settings={
            **settings.to_dict(),
            "context": tasks.context,
            "length": tasks.length,
            "dtype": quality,
            "device": device,
        },
        out=str(prepared.out),
        resumes=(prepared.out / "results").is_dir(),
    )


def _kv_bytes_of(reader: CheckpointReader, dtype: torch.dtype) -> KVBytes | None:
    """Return a function from tokens to the bytes of the model's cache; None for an unknown family."""
    try:
        config = unfused(reader).config
    except SurgeryError:
        return None
    return kv_bytes_of(config, dtype) if config["model_type"] in {"surgery", *FAMILIES, *LATENT_FAMILIES} else None


def _num_elements(reader: CheckpointReader) -> int:
    """Count the elements of the weights; tied embeddings count once."""
    copies = {"lm_head.weight"} if reader.config.get("tie_word_embeddings") else set()
    infos = [reader.info(name) for name in reader.names() if name not in copies]
    return sum(info.nbytes // info.dtype.itemsize for info in infos)
