"""The tokenizer of a GGUF file as the files of a Hugging Face tokenizer.

Byte-level BPE is built here, because transformers' own conversion cuts every text as GPT-2 does: digits of SmolLM2, for
one, would come out as tokens that the model has hardly seen. SentencePiece vocabularies are left to transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surgery.common.errors import SurgeryError

_MODEL, _CUT, _TEMPLATE = "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"
_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens; the others are found by the merges alone

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_WORD = rf"{_BEFORE}\p{{L}}+"
_THREE_DIGITS = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_ONE_DIGIT = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
# How text is cut before merges, by the name that the file gives it; read in llama.cpp's llama-vocab.cpp, not run.
SPLITS = {
    **dict.fromkeys(("llama-bpe", "dbrx", "smaug-bpe", "chatglm-bpe"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "stablelm2"), _ONE_DIGIT),
    "tekken": rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_LIKE_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo")
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_WHOLE_FIRST = ("llama-bpe", "tekken")  # a word that is a token is not merged from parts


def write_tokenizer(path: Path, metadata: dict[str, Any], folder: Path) -> None:
    """Writes tokenizer.json, its config and chat_template.jinja into ``folder``, if the file has a tokenizer.

    Raises:
        SurgeryError: it is of a kind that would be cut otherwise than the model was trained with.
    """
    kind = metadata.get(_MODEL)
    if kind is None:
        return
    if kind == "gpt2":
        try:
            _write_bpe(path, metadata, folder)
        except SurgeryError:
            raise
        except Exception as error:  # whatever a damaged vocabulary raises, plain exceptions of Rust among them
            raise SurgeryError.at(path, f"damaged tokenizer ({error}); convert the model to GGUF again") from None
    elif kind == "llama":
        _write_sentencepiece(path, folder)
    else:
        raise SurgeryError.at(path, f"tokenizer of kind {kind!r} is not supported; give the model's Hugging Face files")
    if template := metadata.get(_TEMPLATE):
        if not isinstance(template, str):
            raise SurgeryError.at(path, f"its chat template is {template!r}, not text; convert the model to GGUF again")
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_bpe(path: Path, metadata: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    cut = metadata.get(_CUT)
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise SurgeryError.at(path, "its tokenizer has no tokens or no merges; convert the model to GGUF again")
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=cut in _WHOLE_FIRST))
    tokenizer.pre_tokenizer = _pre_tokenizer(path, cut)
    tokenizer.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    # The ids that the vocabulary gives are the model's; a token that is twice in it would move others.
    if tokenizer.get_vocab_size() != len(tokens):
        raise SurgeryError.at(path, f"its tokenizer has {len(tokens)} tokens, some of them twice; convert it again")
    special_tokens = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(index) is int and 0 <= index < len(tokens):
            special_tokens[f"{name}_token"] = tokens[index]
    byte_level = processors.ByteLevel(trim_offsets=False)
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in special_tokens:
        bos = special_tokens["bos_token"]
        before = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocabulary[bos])]
        )
        byte_level = processors.Sequence([byte_level, before])
    tokenizer.post_processor = byte_level
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        **special_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _context(metadata),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _pre_tokenizer(path: Path, cut: str | None):
    from tokenizers import Regex, pre_tokenizers

    if cut in _LIKE_GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if cut in _DIGITS_APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if cut in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[cut]), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    choices = ", ".join((*_LIKE_GPT2, *_DIGITS_APART, *SPLITS))
    raise SurgeryError.at(path, f"how its tokenizer cuts text ({_CUT} {cut!r}) is not known here (known: {choices})")


def _context(metadata: dict[str, Any]) -> int:
    return int(metadata.get(f"{metadata.get('general.architecture')}.context_length", 2048))


def _write_sentencepiece(path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever a damaged vocabulary raises
        reason = " ".join(str(error).split())[:200]
        raise SurgeryError.at(path, f"transformers cannot convert its tokenizer ({reason})") from None
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    # Where the file lay, and what transformers made of it for itself.
    for name in ("gguf_file", "name_or_path", "is_local", "local_files_only"):
        fields.pop(name, None)
    config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
