"""Training data of a run: tokenizes its sources once, packs them to rows and mixes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.running.processes import ALONE, Processes
from surgery.training.data import Sequences, TrainingRow
from surgery.training.packing import PackedSequences, Recalls, RowShape, digest
from surgery.training.settings import HealSettings
from surgery.training.shuffling import interleaving
from surgery.training.sources import TextSource, fitting, parse_sources
from surgery.training.token_file import TokenFile


@dataclass(frozen=True)
class HealingData:
    """Training and held-out sequences of a run; held-out rows are equal in every run on this data."""

    sequences: Sequences
    held_out: list[TrainingRow]

    @property
    def data_sha256(self) -> str:
        """Hash of the training rows; see `Sequences`."""
        return self.sequences.data_sha256

    def describe(self) -> dict[str, Any]:
        """Return JSON values for the log."""
        return {**self.sequences.describe(), "sha256": self.data_sha256}


def open_data(
    settings: HealSettings,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    processes: Processes = ALONE,
    progress: Progress | None = None,
) -> HealingData:
    """Open the data of a run; every process must call it.

    The main process writes tokenized documents to `folder`, from which all processes read them, also after a resume.

    Args:
        settings: `data`; `length`, tokens of a row, bos included; `held_out`, rows that are split over the sources by
            weight; `recall`; and `seed`, which does not change the choice of held-out documents.

    Raises:
        SurgeryError: a source cannot be read or has too little text.
    """
    progress = progress or Progress(silent=True)
    sources, recall, seed = fitting(parse_sources(settings.data), tokenizer), settings.recall, settings.seed
    weights = [source.weight for source in sources]
    parts = []
    for source, share in zip(sources, shares_of(settings.held_out, weights), strict=True):
        shape = RowShape.of(tokenizer, settings.length)
        recalls = Recalls(tokenizer, recall, seed, source.wording) if recall else None
        file = _token_file(source, tokenizer, Path(folder), processes, progress)
        parts.append(PackedSequences(file, shape, source.source, seed, share, recalls))
    rows = [row for part in parts for row in part.held_out]
    return HealingData(parts[0] if len(parts) == 1 else MixedSequences(parts, weights), rows)


def _token_file(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, folder: Path, processes: Processes, progress: Progress
) -> TokenFile:
    """Open the tokenized documents of a source, which the main process writes to the folder if they are missing."""
    identity = source.identity(tokenizer)
    path = folder / f"tokens-{digest(identity)[:16]}"

    def write() -> None:
        if TokenFile.read(path, identity) is None:
            with progress.phase(f"tokenizing {source.source}", None, "token") as advance:
                TokenFile.write(path, identity, source.documents(tokenizer), source.tokens, advance)

    processes.from_main(write)
    file = TokenFile.read(path, identity)
    if file is None:
        raise SurgeryError(f"{path}: not visible to every process; choose an --out on a shared disk")
    return file


class MixedSequences:
    """Sequences interleaved from several sources by weight, with a period of at most 1,000. See `Sequences`.

    Every sequence of the mixture is the next one of its source, so that each source is read in order, epoch after
    epoch, at its own rate.
    """

    def __init__(self, parts: Sequence[Sequences], weights: Sequence[float]) -> None:
        """Mix `parts` by relative `weights`; see `surgery.training.shuffling.interleaving`."""
        self._parts, self._weights = list(parts), list(weights)
        self._order = interleaving(weights)
        ones = self._order[:, None] == np.arange(len(self._parts))
        self._in_period = ones.sum(axis=0)
        self._before = np.concatenate([np.zeros((1, len(self._parts)), dtype=np.int64), np.cumsum(ones, axis=0)])
        self.data_sha256 = digest({"parts": [part.data_sha256 for part in parts], "order": self._order.tolist()})

    def sequence(self, number: int) -> TrainingRow:
        period, position = divmod(number, len(self._order))
        part = int(self._order[position])
        return self._parts[part].sequence(int(period * self._in_period[part] + self._before[position, part]))

    def describe(self) -> dict[str, Any]:
        total = sum(self._weights)
        return {
            "mixture": [
                {"weight": round(weight / total, 4), **part.describe()}
                for weight, part in zip(self._weights, self._parts, strict=True)
            ]
        }


def shares_of(count: int, weights: Sequence[float]) -> list[int]:
    """Count the sequences of each part among the first `count` of a mixture."""
    order = interleaving(weights)
    return np.bincount(order[np.arange(count) % len(order)], minlength=len(weights)).tolist()
