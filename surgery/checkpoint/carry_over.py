"""Copying of unchanged data in a conversion: all tensors except attention, and the sidecar files."""

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
    """Copy tensors byte for byte, or scaled if they have a factor.

    An output head missing in the source is a copy of the embeddings.
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
    """Copy tokenizer, generation config and other sidecars, the source's model card under another name, and our code.

    ``config.json`` must be written before: it determines the tokenizer class in transformers.
    """
    for name in carried.names:
        writer.copy_file(carried.folder / name, SOURCE_CARD if name == CARD else name)
    for path in code:
        writer.copy_file(path, path.name)
    keep_tokens(carried.folder, writer)
    if reader.stored_names:
        name_processor(carried.folder, writer)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """Multiply a tensor in place, in float64 with one rounding; in chunks, as a float64 embedding would not fit."""
    for piece in tensor.view(-1).split(2**22):
        piece.copy_(piece.double() * factor)
    return tensor
