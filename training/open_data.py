"""Training data of a run: tokenizes its sources once, packs them to rows and mixes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.running.processes import ALONE, Processes
from surgery.training.data import Sequences, TrainingRow
from surgery.training.mixture import MixedSequences, shares_of
from surgery.training.packing import PackedSequences, Recalls, RowShape, digest
from surgery.training.settings import HealSettings
from surgery.training.sources import TextSource, fitting, parse_sources
from surgery.training.token_file import TokenFile


@dataclass(frozen=True)
class HealingData:
    """Training and held-out sequences of a run.

    Attributes:
        sequences: endless rows to train on.
        held_out: rows of documents that are not trained on; equal in every run on this data.
    """

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
            weight; `recall`, which conversations ignore, since planted lines would break the chat template's turns; and
            `seed`, which does not change the choice of held-out documents.

    Raises:
        SurgeryError: a source cannot be read or has too little text.
    """
    progress = progress or Progress(silent=True)
    sources, recall, seed = fitting(parse_sources(settings.data), tokenizer), settings.recall, settings.seed
    weights = [source.weight for source in sources]
    parts = []
    for source, share in zip(sources, shares_of(settings.held_out, weights), strict=True):
        shape = RowShape.of(tokenizer, settings.length)
        recalls = None if source.is_chat or not recall else Recalls(tokenizer, recall, seed, source.wording)
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
