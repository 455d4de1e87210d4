"""Disk cache of a teacher's top-k logits, so that the teacher need not be in memory while the student trains.

A folder holds `teacher-logits.json`, which identifies the teacher and the data, and shards of equally many sequences,
`shard-00000.safetensors` and so on, each with the fields of `top_k.TopK`: values [R, T - 1, k], ids and rest. Shards
are written atomically, so an interrupted run resumes with the missing ones. A position takes 6 k + 4 bytes (k float16
values and int32 ids, one fp32 rest): k = 64 takes 388 GB for a billion tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from surgery.checkpoint.disk import disk_errors, free_bytes, read_json, read_json_or_empty, written_whole
from surgery.common.errors import SurgeryError
from surgery.common.human import size
from surgery.common.progress import Progress
from surgery.running.processes import ALONE, Processes
from surgery.training.chunks import States
from surgery.training.data import Sequences, collate
from surgery.training.distillation import Body, vocabulary_of
from surgery.training.settings import HealSettings
from surgery.training.top_k import TopK, top_k

HEADER = "teacher-logits.json"
SHARD_BYTES = 256 * 10**6
"""Approximate size of a shard in bytes."""
_FORMAT = 1


@dataclass(frozen=True)
class CacheIdentity:
    """Identity of a logits cache: the values that determine its content.

    `model` is the sha256 of the teacher's weights, `data` that of the sequences, with the kind of attention; `length`
    are the tokens T of a sequence, `k` the tokens per position.
    """

    model: str
    data: str
    sequences: int
    length: int
    vocabulary: int
    k: int

    @property
    def sequence_bytes(self) -> int:
        """Bytes of one sequence on disk: (T - 1)·(6 k + 4)."""
        return (self.length - 1) * (6 * self.k + 4)


class TeacherLogits:
    """Cache of top-k logits in a folder, written shard by shard and read by sequence number."""

    def __init__(self, folder: str | Path, identity: CacheIdentity) -> None:
        """Open the folder; create it with a header if it is missing or empty.

        Raises SurgeryError: it holds other files, or logits of another model, other data or other sizes.
        """
        self.folder, self.identity = Path(folder), identity
        self._rows = max(1, min(SHARD_BYTES // identity.sequence_bytes, identity.sequences))
        header = {"format": _FORMAT, **asdict(identity), "sequences_per_shard": self._rows}
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            # Listed once: another process may write the header meanwhile.
            names = [name for name in os.listdir(self.folder) if not name.endswith(".partial")]
        if names and HEADER not in names:
            raise SurgeryError.at(self.folder, "contains files other than teacher logits; choose another folder")
        if not names:
            with written_whole(self.folder / HEADER) as part:
                part.write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")
        there = read_json(self.folder / HEADER)
        differing = [
            f"{name} {there.get(name)!r} instead of {header[name]!r}"
            for name in header
            if there.get(name) != header[name]
        ]
        if differing:
            raise SurgeryError.at(
                self.folder, f"its teacher logits do not fit this run ({', '.join(differing)}); choose another folder"
            )

    def missing(self) -> list[range]:
        """Return the sequence numbers of each missing shard; empty if the cache is complete."""
        with disk_errors(self.folder):
            names = set(os.listdir(self.folder))
        starts, end = range(0, self.identity.sequences, self._rows), self.identity.sequences
        shards = [range(start, min(start + self._rows, end)) for start in starts]
        return [shard for shard in shards if self._path(shard.start // self._rows).name not in names]

    def read(self, number: int) -> TopK:
        """Read one sequence: `TopK` with [T - 1] positions on the CPU. Position t predicts token t + 1.

        Raises SurgeryError: its shard is damaged.
        """
        shard, row = divmod(number, self._rows)
        path = self._path(shard)
        try:
            with disk_errors(path), safe_open(path, framework="pt") as file:
                tensors = {name: file.get_slice(name)[row] for name in ("values", "ids", "rest")}
        except (SafetensorError, IndexError) as error:
            raise SurgeryError.at(path, f"damaged ({error}); remove it and set teacher to write it again") from None
        return TopK(**tensors, vocabulary=self.identity.vocabulary)

    def batch(self, numbers: list[int]) -> TopK:
        """Read several sequences: `TopK` with [B, T - 1] positions."""
        return _joined([self.read(number) for number in numbers], torch.stack)

    def fill(
        self,
        states: Callable[[range], States],
        *,
        batch: int = 8,
        processes: Processes = ALONE,
        advance: Callable[[int], Any] = int,
    ) -> None:
        """Write the missing shards, split over the processes, and wait for all processes.

        `states` returns the teacher's `States` for sequence numbers, with hidden [B, T, D]; `advance` is called with
        the number of sequences after each batch. Raises SurgeryError: a file cannot be written, or the disk has too
        little space.
        """
        missing = self.missing()
        needed = sum(map(len, missing)) * self.identity.sequence_bytes
        if needed > (free := free_bytes(self.folder)):
            raise SurgeryError.at(
                self.folder,
                f"the missing teacher logits take {size(needed)}, the disk has"
                f" {size(free)} free; lower teacher_top_k ({self.identity.k}) or train on fewer sequences",
            )
        for numbers in missing[processes.rank :: processes.count]:
            pieces = []
            for start in range(numbers.start, numbers.stop, batch):
                batch_numbers = range(start, min(start + batch, numbers.stop))
                pieces.append(self._top_of(states(batch_numbers)))
                advance(len(batch_numbers))
            tensors = _joined(pieces, torch.cat).map(Tensor.contiguous).tensors()
            with written_whole(self._path(numbers.start // self._rows)) as part:
                part.write_bytes(save(tensors))
        processes.wait()

    def _top_of(self, states: States) -> TopK:
        """Compute top-k logits from hidden states [B, T, D] at all positions but the last; on the CPU."""
        hidden = states.hidden[:, :-1]
        top = top_k(states._replace(hidden=hidden.flatten(0, 1)), self.identity.k)
        return top.map(lambda tensor: tensor.unflatten(0, hidden.shape[:2]).cpu())

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.safetensors"


def _joined(pieces: list[TopK], join: Callable[[list[Tensor]], Tensor]) -> TopK:
    return pieces[0].of({name: join([piece.tensors()[name] for piece in pieces]) for name in pieces[0].tensors()})


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
    """Open the logits cache of the settings; a teacher writes the missing shards first.

    Raises SurgeryError: the cache has another identity, too few sequences, or missing ones without a teacher.
    """
    needed = settings.most_steps(processes.count) * settings.global_batch(processes.count)
    header = Path(settings.teacher_logits) / HEADER
    header_values = processes.from_main(lambda: read_json_or_empty(header))
    if teacher is None and not header_values:
        raise SurgeryError(f"{settings.teacher_logits}: contains no teacher logits; set teacher too, to write them")
    num_sequences = header_values.get("sequences", needed)
    if num_sequences < needed:
        raise SurgeryError(
            f"{settings.teacher_logits}: has logits of {num_sequences} sequences, the budget needs {needed}; lower "
            "max_tokens or max_steps, or choose another folder"
        )
    identity = CacheIdentity(
        model=teacher_sha256 or header_values["model"],
        data=f"{sequences.data_sha256}, attention {'inside documents' if document_masks else 'over whole rows'}",
        sequences=num_sequences,
        length=settings.length,
        vocabulary=vocabulary if teacher is None else vocabulary_of(teacher),
        k=min(settings.teacher_top_k, vocabulary - 1) if teacher is not None else header_values["k"],
    )
    processes.from_main(lambda: TeacherLogits(settings.teacher_logits, identity) and None)
    logits = TeacherLogits(settings.teacher_logits, identity)
    missing = sum(map(len, logits.missing()))
    if teacher is None and missing:
        raise SurgeryError(
            f"{settings.teacher_logits}: {missing} sequences are missing; set teacher too, to write them"
        )
    if teacher is not None:
        body = Body.of(teacher)
        device = next(teacher.parameters()).device

        @torch.no_grad()
        def states(numbers: range) -> States:
            batch = collate([sequences.sequence(number) for number in numbers]).to(device)
            return States(body.states(batch.tokens, batch.position_ids if document_masks else None), body.head())

        with progress.phase("teacher logits", missing, "sequence") as advance:
            logits.fill(states, batch=settings.batch_size, processes=processes, advance=advance)
    return logits
