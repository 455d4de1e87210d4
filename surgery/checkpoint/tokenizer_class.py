"""Tokenizer class of a converted checkpoint, chosen so that text is cut into the source's tokens.

transformers chooses the class of a tokenizer by the model type too: for some types, qwen2 among them, it takes a class
of its own whatever ``tokenizer_config.json`` names, because published ones name a wrong one (DeepSeek's distillations
into Qwen2 say Llama). A conversion changes the model type, and the named class would be taken at its word.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from surgery.checkpoint import CheckpointWriter
from surgery.common.errors import SurgeryError

CONFIG, TOKENIZER = "tokenizer_config.json", "tokenizer.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py")
OF_A_CONFIG = ("model_type", "tokenizer_class", "auto_map")
SAMPLES = (
    "def f(x):\n    return x + 1234  # naïve\n\n\n\tif x: ...",
    "The quick brown fox, it's 3.14 -- and\ttabs.  Two spaces. ",
    "日本語 Ελληνικά русский العربية 🙂 ½",
)


def keep_tokens(source: Path, writer: CheckpointWriter) -> None:
    """Names the class that transformers takes for the source, where it would now take another that cuts otherwise.

    Args:
        source: the folder with the source's tokenizer and config.json.
        writer: has config.json and the copied tokenizer already.

    Raises:
        SurgeryError: the copy cuts text otherwise with that class too.
    """
    expected = _cutting(source)
    if expected is None or _cuts_alike(writer.partial, expected):
        return
    path = writer.partial / CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    writer.write_json(CONFIG, {**config, "tokenizer_class": expected.name})
    if not _cuts_alike(writer.partial, expected):
        _copy_as_loaded(source, writer)
    if not _cuts_alike(writer.partial, expected):
        raise SurgeryError(
            f"{source}: its tokenizer, {expected.name}, is not taken for the converted model's type and another "
            "would cut text otherwise; load it and save it with save_pretrained, then convert"
        )


def _copy_as_loaded(source: Path, writer: CheckpointWriter) -> None:
    """Writes how the source's class cuts into tokenizer.json, for types whose named class transformers overrules."""
    with TemporaryDirectory() as folder:
        _loaded(source).save_pretrained(folder)
        if (saved := Path(folder) / TOKENIZER).exists():
            writer.copy_file(saved, TOKENIZER)


class Cutting(NamedTuple):
    """Tokenizer's class name, and the ids that it makes of the samples."""

    name: str
    ids: list[list[int]]


def _cuts_alike(folder: Path, expected: Cutting) -> bool:
    cutting = _cutting(folder)
    return cutting is not None and cutting.ids == expected.ids


_KNOWN: dict[str, Cutting | None] = {}
"""Cuttings by `_key`: loading a tokenizer takes a second, and conversions of one source in one process ask for the
same."""


def _cutting(folder: Path) -> Cutting | None:
    """Return the tokens of a folder's tokenizer; None where there is none that transformers can read."""
    key = _key(folder)
    if key not in _KNOWN:
        _KNOWN[key] = _measured(folder)
    return _KNOWN[key]


def _loaded(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _measured(folder: Path) -> Cutting | None:
    try:
        tokenizer = _loaded(folder)
        return Cutting(type(tokenizer).__name__, [tokenizer(text).input_ids for text in SAMPLES])
    except Exception:
        # Whatever a damaged or foreign tokenizer raises: it is copied unchanged, and calibration says what is wrong.
        return None


def _key(folder: Path) -> str:
    """Hash of all files but weights and hidden ones; of config.json of what says which class a tokenizer gets."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in WEIGHTS or path.name.startswith(".") or not path.is_file():
            continue
        content = path.read_bytes()
        if path.name == "config.json":
            config = json.loads(content)
            content = json.dumps([config.get(name) for name in OF_A_CONFIG]).encode()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
