"""Temporary Hugging Face folder for a GGUF file, with config and tokenizer, for loaders that need a folder.

Weights are added by `surgery.checkpoint.model_folder`. One per file and process, removed at process exit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.gguf_header import read_gguf_header
from surgery.checkpoint.gguf_model import GgufModel, describe_model, special_tokens
from surgery.checkpoint.gguf_tokenizer import write_tokenizer
from surgery.checkpoint.layout import CONFIG
from surgery.common.temporary import TemporaryFolder


@dataclass(frozen=True)
class GgufFolder:
    """Parsed GGUF file, and the folder with its config.json and tokenizer."""

    file: Path
    model: GgufModel
    folder: Path


def open_gguf(file: Path) -> GgufFolder:
    """Read the header of a GGUF file and write its config and tokenizer, once per process for an unchanged file.

    Raises SurgeryError: the file is damaged, or its model or tokenizer is not supported.
    """
    file = file.absolute()  # not resolved: files in the hub's cache are links to blobs without a name
    status = file.stat()
    return _opened(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=8)
def _opened(file: Path, size: int, changed: int) -> GgufFolder:
    header = read_gguf_header(file)
    model = describe_model(file, header)
    folder = temporary_folder() / file.stem
    with disk_errors(folder):
        folder.mkdir()
        (folder / CONFIG).write_text(json.dumps(model.config, indent=2) + "\n", encoding="utf-8")
        if generation := special_tokens(header.metadata):
            text = json.dumps(generation, indent=2) + "\n"
            (folder / "generation_config.json").write_text(text, encoding="utf-8")
        write_tokenizer(file, header.metadata, folder)
    return GgufFolder(file, model, folder)


_KEPT: list[TemporaryFolder] = []


def temporary_folder() -> Path:
    """Create a folder that is removed at process exit."""
    _KEPT.append(TemporaryFolder("gguf"))
    return _KEPT[-1].path
