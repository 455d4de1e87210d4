"""Tokenizer metadata for GGUF, from tokenizer.json or copied from another GGUF file.

llama.cpp identifies pre-tokenizers by name. For a tokenizer.json the name is found by its split pattern; unknown
patterns are refused. A GGUF file of the source model contains the right name.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from surgery.checkpoint.disk import read_json, read_json_or_empty
from surgery.checkpoint.gguf_header import read_gguf_header
from surgery.checkpoint.gguf_tokenizer import pre_tokenizer_name
from surgery.common.errors import SurgeryError

# gguf's TokenType.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


@dataclass(frozen=True)
class Tokenizer:
    """Metadata keys that begin with ``tokenizer.``, each with its value, GGUF type and item type."""

    keys: dict[str, tuple[Any, Any, Any]]
    origin: str

    def write(self, writer) -> None:
        """Write the keys to a ``gguf.GGUFWriter``."""
        for key, (value, kind, items) in self.keys.items():
            writer.add_key_value(key, value, kind, sub_type=items)


def copied_tokenizer(path: Path, folder: Path, vocabulary: int) -> Tokenizer:
    """Copy the tokenizer of another GGUF file with the tokens of a checkpoint.

    Args:
        folder: the checkpoint's folder. Without tokenizer.json only the number of tokens is compared.
        vocabulary: number of tokens of the checkpoint.

    Raises:
        SurgeryError: the file cannot be read, or its tokens are others.
    """
    tokens = read_gguf_header(path).metadata.get("tokenizer.ggml.tokens") or []
    expected = _vocabulary(read_json_or_empty(folder / "tokenizer.json"))
    differing = sum(_plain(token) != _plain(expected.get(number, token)) for number, token in enumerate(tokens))
    # Converters respell a few tokens.
    if len(tokens) != vocabulary or differing > len(tokens) / 100:
        reason = f"has {len(tokens):,} tokens, of which {differing:,} differ from the checkpoint's {vocabulary:,}"
        raise SurgeryError.at(path, f"{reason}; pass a GGUF file of its source", setting="tokenizer_from")
    fields = import_module("gguf").GGUFReader(path).fields
    keys = {
        name: (field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for name, field in fields.items()
        if name.startswith("tokenizer.")
    }
    return Tokenizer(keys, f"tokenizer of {path.name}")


def _vocabulary(document: dict[str, Any]) -> dict[int, str]:
    """Return the tokens by id of a tokenizer.json, without added tokens; empty if it has none."""
    vocab = document.get("model", {}).get("vocab", {})
    if isinstance(vocab, list):  # Unigram: pairs of token and score
        vocab = {pair[0]: number for number, pair in enumerate(vocab)}
    added = {token["id"] for token in document.get("added_tokens", [])}
    return {number: token for token, number in vocab.items() if number not in added}


def _plain(token: str) -> str:
    """Spell spaces alike: converters write some as the SentencePiece space symbol."""
    return token.replace("\u2581", " ")


def read_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """Convert the byte-level BPE in a checkpoint's tokenizer.json.

    Raises SurgeryError: there is no such tokenizer, or llama.cpp has no known pre-tokenizer that splits text equally.
    """
    kinds = import_module("gguf").GGUFValueType
    path, pre = folder / "tokenizer.json", pre_tokenizer_name(folder)
    if pre is None:
        reason = "has no tokenizer.json, or llama.cpp has no known pre-tokenizer that splits text this way"
        raise SurgeryError.at(folder, f"{reason}; pass a GGUF file of the source model by --tokenizer-from FILE")
    document = read_json(path)
    settings = read_json_or_empty(folder / "tokenizer_config.json")
    model = document["model"]
    tokens, types = _tokens(path, document, config["vocab_size"])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    keys = {
        "model": ("gpt2", kinds.STRING, None),
        "pre": (pre, kinds.STRING, None),
        "tokens": (tokens, kinds.ARRAY, kinds.STRING),
        "token_type": (types, kinds.ARRAY, kinds.INT32),
        "merges": (merges, kinds.ARRAY, kinds.STRING),
        "add_bos_token": (_adds_first_token(document), kinds.BOOL, None),
    }
    numbers = {token: number for number, token in enumerate(tokens)}
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, key in names.items():
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        number = numbers.get(token, config.get(f"{name}_token_id"))
        number = number[0] if isinstance(number, list) else number
        if number is not None:
            keys[f"{key}_token_id"] = (number, kinds.UINT32, None)
    keys = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    template = _chat_template(folder, settings)
    if template:
        keys["tokenizer.chat_template"] = (template, kinds.STRING, None)
    return Tokenizer(keys, f"tokenizer of tokenizer.json, split as {pre}")


def _tokens(path: Path, document: dict[str, Any], vocabulary: int) -> tuple[list[str], list[int]]:
    added = {token["id"]: token for token in document.get("added_tokens", [])}
    vocab = {number: token for token, number in document["model"]["vocab"].items()}
    vocab |= {number: token["content"] for number, token in added.items()}
    if max(vocab) >= vocabulary:
        raise SurgeryError.at(path, f"token ID {max(vocab)} exceeds the vocabulary of the model, {vocabulary:,} tokens")
    types = [UNUSED if number not in vocab else NORMAL for number in range(vocabulary)]
    for number, token in added.items():
        types[number] = CONTROL if token.get("special") else USER_DEFINED
    return [vocab.get(number, f"[PAD{number}]") for number in range(vocabulary)], types


def _adds_first_token(document: dict[str, Any]) -> bool:
    """Return whether the tokenizer adds a special token at the start."""
    post = document.get("post_processor") or {}
    templates = [step.get("single") for step in post.get("processors", [post]) if step.get("single")]
    return any("SpecialToken" in template[0] for template in templates)


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    return template if isinstance(template, str) else None
