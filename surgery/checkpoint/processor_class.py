"""Processor class of a converted vision-language model.

If no file names the class, transformers derives it from the model type, which a conversion changes.
"""

from __future__ import annotations

from pathlib import Path

from surgery.checkpoint import CheckpointWriter
from surgery.checkpoint.disk import read_json_or_empty
from surgery.checkpoint.tokenizer_class import CONFIG

NAMED_IN = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", CONFIG)
KEY = "processor_class"


def name_processor(source: Path, writer: CheckpointWriter) -> None:
    """Add the source's processor class to tokenizer_config.json, unless a file of the output names the class.

    Args:
        source: folder with the source's config.json.
        writer: writer of the output, which has config.json and the copied files already.
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
