"""Has a converted checkpoint cut text into the tokens that its source does.

transformers chooses the class of a tokenizer by the model type too: for some types, qwen2 among them, it takes a class
of its own whatever ``tokenizer_config.json`` names, because published ones name a wrong one (DeepSeek's distillations
into Qwen2 say Llama). A conversion changes the model type, and the named class would be taken at its word.
"""

from __future__ import annotations

import json
from pathlib import Path

from surgery.checkpoint import CheckpointReader, CheckpointWriter
from surgery.common.errors import SurgeryError

CONFIG = "tokenizer_config.json"
SAMPLES = (
    "def f(x):\n    return x + 1234  # naïve\n\n\n\tif x: ...",
    "The quick brown fox, it's 3.14 -- and\ttabs.  Two spaces. ",
    "日本語 Ελληνικά русский العربية 🙂 ½",
)


def keep_tokens(reader: CheckpointReader, writer: CheckpointWriter) -> None:
    """Names the class that transformers takes for the source, where it would now take another that cuts otherwise.

    Args:
        reader: the source.
        writer: has config.json and the copied tokenizer already.

    Raises:
        SurgeryError: the copy cuts text otherwise with that class too.
    """
    source = _load(reader.path)
    if source is None or _cut(_load(writer.partial)) == _cut(source):
        return
    path, name = reader.path / CONFIG, type(source).__name__
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    writer.write_json(CONFIG, {**config, "tokenizer_class": name})
    if _cut(_load(writer.partial)) != _cut(source):
        raise SurgeryError(
            f"{reader.path}: its tokenizer, {name}, is not taken for the converted model's type and another would cut "
            "text otherwise; load it and save it with save_pretrained, then convert"
        )


def _load(folder: Path):
    """The tokenizer of a folder; None where there is none that transformers can read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:
        # Whatever a damaged or foreign tokenizer raises: it is copied as it is, and calibration says what is wrong.
        return None


def _cut(tokenizer) -> list[list[int]] | None:
    return None if tokenizer is None else [tokenizer(text).input_ids for text in SAMPLES]
