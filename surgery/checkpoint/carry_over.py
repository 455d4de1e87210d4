"""Copying of unchanged data in a conversion: all tensors except attention, and the sidecar files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from surgery.checkpoint import CheckpointReader, CheckpointWriter
from surgery.checkpoint.carried_files import CarriedFiles
from surgery.checkpoint.disk import read_json_or_empty
from surgery.checkpoint.file_kinds import CARD, SOURCE_CARD
from surgery.checkpoint.tokenizer_class import CONFIG, keep_tokens
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


NAMED_IN = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", CONFIG)
KEY = "processor_class"


def name_processor(source: Path, writer: CheckpointWriter) -> None:
    """Add the source's processor class to tokenizer_config.json, unless a file of the output names the class.

    Otherwise transformers derives it from the model type, which a conversion changes.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    folders = source, writer.partial
    before, after = (read_json_or_empty(folder / "config.json").get("model_type") for folder in folders)
    configs = {name: read_json_or_empty(writer.partial / name) for name in NAMED_IN}
    if before == after or any(KEY in each for each in configs.values()):
        return
    if before in CONFIG_MAPPING and (kind := CONFIG_MAPPING[before]) in PROCESSOR_MAPPING:
        writer.write_json(CONFIG, {**configs[CONFIG], KEY: PROCESSOR_MAPPING[kind].__name__})
