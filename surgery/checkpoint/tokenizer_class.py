"""Tokenizer class of a converted checkpoint, chosen so that it tokenizes like the source.

transformers also chooses the tokenizer class by model type: for some types, qwen2 among them, it ignores the class in
``tokenizer_config.json``, since published configs name a wrong one (DeepSeek's distillations into Qwen2 say Llama).
A conversion changes the model type, and the wrong class would be used.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from surgery.checkpoint import CheckpointWriter
from surgery.checkpoint.disk import read_json_or_empty
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
    """Set the tokenizer class that transformers uses for the source, if the output would tokenize differently.

    ``writer`` has config.json and the copied tokenizer already. Raises SurgeryError: it differs with that class too.
    """
    expected = _cutting(source)
    if expected is None or _cuts_alike(writer.partial, expected):
        return
    config = read_json_or_empty(writer.partial / CONFIG)
    writer.write_json(CONFIG, {**config, "tokenizer_class": expected.name})
    if not _cuts_alike(writer.partial, expected):
        _copy_as_loaded(source, writer)
    if not _cuts_alike(writer.partial, expected):
        raise SurgeryError(
            f"{source}: transformers does not load its tokenizer, {expected.name}, for the converted model's type, "
            "and another would split text differently; load it and save it with save_pretrained, then convert"
        )


def _copy_as_loaded(source: Path, writer: CheckpointWriter) -> None:
    """Save the source's loaded tokenizer as tokenizer.json, for types whose named class transformers overrides."""
    with TemporaryDirectory() as folder:
        _loaded(source).save_pretrained(folder)
        if (saved := Path(folder) / TOKENIZER).exists():
            writer.copy_file(saved, TOKENIZER)


class Cutting(NamedTuple):
    """Class name of a tokenizer, and its token ids for the samples."""

    name: str
    ids: list[list[int]]


def _cuts_alike(folder: Path, expected: Cutting) -> bool:
    cutting = _cutting(folder)
    return cutting is not None and cutting.ids == expected.ids


_KNOWN: dict[str, Cutting | None] = {}
"""Results by `_key`, since loading a tokenizer takes a second and conversions in one process repeat sources."""


def _cutting(folder: Path) -> Cutting | None:
    """Tokenize the samples with a folder's tokenizer; None if transformers cannot load one."""
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
        # Damaged or unknown tokenizers raise various errors. They are copied unchanged; calibration reports errors.
        return None


def _key(folder: Path) -> str:
    """Hash all files except weights and hidden files; of config.json only the keys that select the tokenizer class."""
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
