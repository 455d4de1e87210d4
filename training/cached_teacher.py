"""A teacher that leaves before the training: its top logits of every sequence that will be trained on."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from surgery.checkpoint.disk import read_json
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.running.processes import Processes
from surgery.training.chunks import States
from surgery.training.data import Sequences, collate
from surgery.training.distillation import Body, vocabulary_of
from surgery.training.settings import HealSettings
from surgery.training.teacher_logits import HEADER, CacheIdentity, TeacherLogits


def open_logits(
    settings: HealSettings,
    sequences: Sequences,
    vocabulary: int,
    *,
    document_masks: bool,
    teacher: PreTrainedModel | None,
    teacher_sha256: str | None,
    processes: Processes,
    progress: Progress,
) -> TeacherLogits:
    """The logits in the folder that the settings name, after the teacher has written those that are missing.

    Args:
        vocabulary: of the student.
        document_masks: whether attention keeps inside of documents: logits are of one or the other.
        teacher: where it is to run; None if all must be there.
        teacher_sha256: of its weights.

    Raises:
        SurgeryError: the folder holds logits of something else or too few, or the data cannot be read twice.
    """
    needed = settings.most_steps(processes.count) * settings.global_batch(processes.count)
    if sequences.state():
        raise SurgeryError("teacher_logits are of sequences by number, which streamed data has not: leave stream out")
    header = Path(settings.teacher_logits) / HEADER
    known = processes.from_main(lambda: read_json(header) if header.exists() else {})
    if teacher is None and not known:
        raise SurgeryError(f"{settings.teacher_logits}: holds no teacher logits; give the teacher too, to write them")
    kept = known.get("sequences", needed)
    if kept < needed:
        raise SurgeryError(
            f"{settings.teacher_logits}: has logits of {kept} sequences, the budget needs {needed}: lower max_tokens or"
            " max_steps, or choose another folder"
        )
    identity = CacheIdentity(
        model=teacher_sha256 or known["model"],
        data=f"{sequences.data_sha256}, attention {'inside documents' if document_masks else 'over whole rows'}",
        sequences=kept,
        length=settings.length,
        vocabulary=vocabulary if teacher is None else vocabulary_of(teacher),
        k=min(settings.teacher_top_k, vocabulary) if teacher is not None else known["k"],
        dtype=known.get("dtype", "float16"),
    )
    processes.from_main(lambda: TeacherLogits(settings.teacher_logits, identity) and None)
    logits = TeacherLogits(settings.teacher_logits, identity)
    missing = sum(map(len, logits.missing()))
    if teacher is None and missing:
        raise SurgeryError(f"{settings.teacher_logits}: {missing} sequences are not written; give the teacher too")
    if teacher is not None:
        body = Body.of(teacher)
        device = next(teacher.parameters()).device

        @torch.no_grad()
        def states(numbers: range) -> States:
            batch = collate([sequences.sequence(number) for number in numbers]).to(device)
            return States(body.states(batch.tokens, batch.position_ids if document_masks else None), body.head())

        with progress.phase("teacher logits", missing, "sequence") as advance:
            logits.fill(states, batch=settings.batch_size, processes=processes, done=advance)
    return logits
