"""Text that the teacher writes: the distribution it knows best, where no other text is at hand.

It is sampled once, in shards that are kept as they are made, so that a stopped run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.calibration.self_samples import sample_from_model
from surgery.checkpoint.disk import disk_errors, written_whole
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.running.processes import Processes
from surgery.training.packing import digest
from surgery.training.token_file import Document

SHARD = 64
"""Sequences of a shard: what is lost at most, by each process, when a run is stopped."""

BATCH = 16
"""Sequences sampled at once."""

FINGERPRINT = 64
"""Values of each parameter that go into a model's fingerprint."""


def sample_teacher(
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    tokens: int,
    length: int,
    seed: int = 0,
    processes: Processes | None = None,
    progress: Progress | None = None,
) -> Iterator[Document]:
    """Samples sequences from the teacher, each shard by one process, and yields them as documents.

    Equal arguments give equal samples as far as the teacher's logits are equal: shard i is drawn with a seed made of
    `seed` and i, whoever draws it. Every process must hold the whole teacher, and the folder must be the same for all.

    Args:
        folder: shards are kept in a subfolder of it, named after everything that decides them.
        tokens: wanted; rounded up to whole shards of 64 sequences.
        length: tokens of a sequence, the first, bos or eos, included.

    Raises:
        SurgeryError: the request is impossible (`sample_from_model`), or a shard cannot be read or written.
    """
    processes, progress = processes or Processes(), progress or Progress(silent=True)
    if tokens < 1:
        raise SurgeryError(f"{tokens} tokens of the teacher: at least 1 is needed")
    shards = list(range(-(-tokens // (SHARD * length))))
    identity = {"model": fingerprint(teacher), "length": length, "seed": seed, "temperature": 1.0}
    folder = folder / f"teacher-text-{digest(identity)[:16]}"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)

    def make(shard: int) -> None:
        path = _path(folder, shard)
        if path.exists():
            return
        drawn = sample_from_model(teacher, tokenizer, SHARD * length, length, BATCH, seed=_seed_of_shard(seed, shard))
        with written_whole(path) as part:
            part.write_bytes(save({"tokens": drawn.to(torch.int32)}))

    with progress.phase("sampling the teacher", len(shards), "shard") as advance:
        processes.map(make, shards, advance)
    processes.wait()
    return (Document(row) for shard in shards for row in _read(_path(folder, shard)).tolist())


def fingerprint(model: PreTrainedModel) -> str:
    """Hash of a model's config and of a few values of each of its parameters: other weights, another hash."""
    config = {**model.config.to_diff_dict(), "_name_or_path": None}
    known = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()[:FINGERPRINT].float().cpu()
        known.update(f"{name} {list(parameter.shape)}".encode())
        known.update(values.numpy().astype("<f4").tobytes())
    return known.hexdigest()


def _seed_of_shard(seed: int, shard: int) -> int:
    """Another one for every pair, below 2⁶³."""
    return int(hashlib.sha256(f"{seed} {shard}".encode()).hexdigest()[:15], 16)


def _path(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.safetensors"


def _read(path: Path) -> Any:
    with disk_errors(path):
        try:
            return load_file(path)["tokens"]
        except (SafetensorError, KeyError) as error:
            raise SurgeryError(f"{path}: not a shard of sampled text, or damaged ({error}); remove it") from None
