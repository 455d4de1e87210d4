"""Copies what a conversion leaves unchanged: every tensor but the attention's, and the files next to the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from surgery.checkpoint import CheckpointReader, CheckpointWriter
from surgery.checkpoint.carried_files import CarriedFiles
from surgery.checkpoint.file_kinds import CARD, SOURCE_CARD
from surgery.checkpoint.processor_class import name_processor
from surgery.checkpoint.tokenizer_class import keep_tokens
from surgery.common.progress import Progress

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def copy_tensors(
    reader: CheckpointReader,
    names: Sequence[str],
    factors: Mapping[str, float],
    writer: CheckpointWriter,
    progress: Progress,
) -> None:
    """Copies tensors byte for byte; those with a factor are scaled by it.

    An output head that the source does not have is a copy of its embeddings.
    """
    origins = {name: EMBEDDING if name == HEAD and name not in reader else name for name in names}
    with progress.phase("copy the rest", sum(reader.info(name).nbytes for name in origins.values()), "B") as advance:
        for name, origin in origins.items():
            if name in factors:
                writer.write(name, _scaled(reader.tensor(origin), factors[name]))
            elif name != origin:
                writer.write(name, reader.tensor(origin))
            else:
                writer.copy(name, reader)
            advance(reader.info(origin).nbytes)


def copy_sidecars(
    reader: CheckpointReader, carried: CarriedFiles, code: Iterable[Path], writer: CheckpointWriter
) -> None:
    """Copies tokenizer, generation config and the like, the source's card under another name, and the package's code.

    ``config.json`` has to be written before: it decides which tokenizer class transformers takes.
    """
    for name in carried.names:
        writer.copy_file(carried.folder / name, SOURCE_CARD if name == CARD else name)
    for path in code:
        writer.copy_file(path, path.name)
    keep_tokens(carried.folder, writer)
    if reader.stored_names:
        name_processor(carried.folder, writer)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """``tensor * factor`` in place, rounded once, a piece at a time: an embedding in float64 would not fit."""
    for piece in tensor.view(-1).split(2**22):
        piece.copy_(piece.double() * factor)
    return tensor
