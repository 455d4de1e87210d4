"""``surgery eval --dry-run``: what an evaluation would run, read, hold and write; no model is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from surgery.calibration.conversations import HELD_OUT_PROMPTS
from surgery.calibration.held_out_documents import INSTALLED, default_names
from surgery.calibration.text import BUILTIN
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.eval.session import Session
from surgery.eval.work import ForeseenTask, Work
from surgery.evaluation.models import Checkpoint
from surgery.evaluation.names import name_and_path
from surgery.evaluation.preparation import Request, prepare
from surgery.evaluation.rows import plan_variants
from surgery.evaluation.settings import HARNESS, EvalSettings
from surgery.evaluation.store import ResultStore
from surgery.evaluation.tasks import build_tasks
from surgery.families import FAMILIES, LATENT_FAMILIES
from surgery.running.kv_bytes import KVBytes, kv_bytes_of
from surgery.running.loading import load_tokenizer
from surgery.running.processes import Processes
from surgery.running.source import checked_device, is_absent
from surgery.running.source_check import open_source
from surgery.running.unfused import unfused
from surgery.structures.dry_run import measure_speed
from surgery.structures.estimates import EFFICIENCY


@dataclass(frozen=True)
class EvaluationPlan:
    """What an evaluation would do; plain values only. Sizes in bytes.

    Attributes:
        rows: models, the baseline first: name, role, path, dtype, bytes of the weights as they are measured, of the
            largest ``cache`` of any task and of a sequence's at ``context`` tokens (``kv``); None where its family has
            no prediction.
        variants: names of cheap baselines, each measured as a model is.
        notes: what could be asked for and will not be there.
        tasks: each with its `surgery.eval.work.Work` of one model; None where it cannot be told.
        total: passes, read and decoded tokens of all models and tasks that can tell.
        settings: of the evaluation, with the text, context, dtype and device that were chosen.
        out: folder of results and report; ``goes_on``: whether it has results already.
    """

    rows: list[dict[str, Any]]
    variants: list[str]
    notes: list[str]
    tasks: list[dict[str, Any]]
    total: dict[str, int]
    settings: dict[str, Any]
    out: str
    goes_on: bool


def plan_evaluation(request: Request, progress: Progress) -> EvaluationPlan:
    """Plans an evaluation of the same request: weights are hashed and texts tokenised, so that their faults show.

    Conversations ("chat") are not drawn; prompts stand in for them. A device need not be on this machine.

    Raises:
        SurgeryError: whatever the evaluation would refuse before it measures.
    """
    asked = request.settings.device
    device = torch.device(asked).type if is_absent(asked) else checked_device(asked).type
    prepared = prepare(request, progress, _stand_in)
    settings, tasks, baseline = prepared.settings, prepared.tasks, prepared.baseline
    ResultStore.check(prepared.out)
    if not request.overwrite:
        prepared.check_report()
    alone = Processes(cpu=True, alone=True)
    session = Session(prepared.tokenizer, alone, progress, settings.batch_size, settings.seed, settings.limit)
    told = [
        (task, sum(task.work(session).values(), Work()) if isinstance(task, ForeseenTask) else None)
        for task in tasks.all
    ]
    quality = settings.quality_dtype(device)

    def dtype(checkpoint: Checkpoint, *, native: bool) -> torch.dtype:
        return getattr(torch, checkpoint.dtype if native or quality == "auto" else quality)

    def row(row) -> dict[str, Any]:
        checkpoint, reader = row.checkpoint, row.checkpoint.reader
        dtypes = {native: dtype(checkpoint, native=native) for native in (False, True)}
        sizes = {native: _kv_bytes_of(reader, dtypes[native]) for native in dtypes}
        known = all(sizes.values())
        caches = [sizes[task.native](work.length, work.rows) for task, work in told if known and work is not None]
        widest = max(dtypes[task.native].itemsize for task in tasks.all)
        return {
            "name": row.name,
            "role": row.role,
            "path": checkpoint.place,
            "dtype": checkpoint.dtype,
            "weights": _numbers(reader) * widest,
            "cache": max(caches, default=None),
            "kv": sizes[True](tasks.context) if known else None,
        }

    rows = [row(each) for each in prepared.rows]
    variants, notes = [], []
    if baseline is not None and settings.variants:
        ratios = [each["kv"] / rows[0]["kv"] for each in rows[1:] if each["kv"] and rows[0]["kv"]]
        variants, notes = plan_variants(settings.variants, baseline.checkpoint, ratios, tasks.context)
    whole, models = sum((work for _, work in told if work), Work()), len(rows) + len(variants)
    return EvaluationPlan(
        rows=rows,
        variants=[each.name for each in variants],
        notes=notes,
        tasks=[
            {"name": task.name, "native": task.native, "work": None if work is None else asdict(work)}
            for task, work in told
        ],
        total={name: models * getattr(whole, name) for name in ("passes", "read", "decoded")},
        settings={**settings.to_dict(), "context": tasks.context, "dtype": quality, "device": device},
        out=str(prepared.out),
        goes_on=(prepared.out / "results").is_dir(),
    )


def expected_seconds(given: Sequence[str], models: int, settings: EvalSettings) -> float | None:
    """About how long an evaluation takes, from its texts and the shapes of one model; no weights are read.

    Args:
        given: models as the user named them; those that are still to be made are taken for one that is there.
        models: how many are measured.

    Returns:
        None where no model or not all text is on this machine, or a task cannot tell its work.
    """
    here = next((path for path in (name_and_path(each)[1] for each in given) if Path(path).exists()), None)
    texts = (name in (BUILTIN, *INSTALLED) or Path(name).exists() for name in settings.data)
    told = all(not name.startswith(HARNESS) for name in settings.tasks)
    if here is None or not told or not all(texts) or is_absent(settings.device):
        return None
    reader, silent, device = open_source(here), Progress(silent=True), checked_device(settings.device)
    tokenizer = load_tokenizer(reader.path)
    settings = replace(settings, data=settings.data or default_names(tokenizer))
    tasks = build_tasks(settings, tokenizer, reader.config, silent).all
    alone = Processes(cpu=True, alone=True)
    session = Session(tokenizer, alone, silent, settings.batch_size, settings.seed, settings.limit)
    if not all(isinstance(task, ForeseenTask) for task in tasks):
        return None
    tokens = sum(work.cost(device.type) for task in tasks for work in task.work(session).values())
    quality = settings.quality_dtype(device.type)
    speed = measure_speed(device, getattr(torch, "bfloat16" if quality == "auto" else quality))["flops_per_second"]
    return models * tokens * 2 * _numbers(reader) / (speed * EFFICIENCY)


def _kv_bytes_of(reader: CheckpointReader, dtype: torch.dtype) -> KVBytes | None:
    """Bytes of its live cache; None for a model of a family that is not known."""
    try:
        config = unfused(reader).config
    except SurgeryError:
        return None
    return kv_bytes_of(config, dtype) if config["model_type"] in {"surgery", *FAMILIES, *LATENT_FAMILIES} else None


def _numbers(reader: CheckpointReader) -> int:
    """Of the weights; a copy of tied embeddings counts once."""
    copies = {"lm_head.weight"} if reader.config.get("tie_word_embeddings") else set()
    infos = [reader.info(name) for name in reader.names() if name not in copies]
    return sum(info.nbytes // info.dtype.itemsize for info in infos)


def _stand_in(checkpoint: Checkpoint, tokenizer: Any, settings: EvalSettings) -> list[str]:
    """Text as long as conversations with the model, which would have to run for them."""
    needed = settings.windows * settings.length // 4 + 1  # the shortest prompt has more than four tokens
    return [" ".join(islice(cycle(HELD_OUT_PROMPTS), needed))]
