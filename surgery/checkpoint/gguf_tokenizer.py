"""Conversion of a GGUF file's tokenizer to Hugging Face tokenizer files.

Byte-level BPE is built here because transformers' conversion pre-tokenizes every text like GPT-2: the digits of
SmolLM2, for example, would become tokens that are rare in its training. Gemma's vocabularies are built here because
their scores do not give the order of merges. Other SentencePiece vocabularies are left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.common.errors import SurgeryError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MODEL, _CUT, _TEMPLATE = "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"
_SPACE = "\u2581"  # stands for a space in SentencePiece vocabularies
_CONTROL, _USER_DEFINED = 3, 4  # token types that are matched before merges

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_WORD = rf"{_BEFORE}\p{{L}}+"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED, _CAPITALS = rf"{_BEFORE}{_UPPER}*{_LOWER}+", rf"{_BEFORE}{_UPPER}+{_LOWER}*"
_THREE_DIGITS = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_ONE_DIGIT = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
# Pre-tokenization pattern by ``tokenizer.ggml.pre``; from the source of llama.cpp's llama-vocab.cpp, not verified by
# running it.
SPLITS = {
    **dict.fromkeys((*_LLAMA3, "dbrx", "smaug-bpe", "chatglm-bpe"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _ONE_DIGIT),
    "tekken": rf"{_CASED}|{_CAPITALS}|\p{{N}}|{_SLASHES}",
    "gpt-4o": rf"{_CASED}{_CONTRACTIONS}?|{_CAPITALS}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASHES}",
    "seed-coder": rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_LIKE_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "mellum", "trillion")
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_WHOLE_FIRST = (*_LLAMA3, "tekken")  # words in the vocabulary skip the merges; BOS by default


def write_tokenizer(path: Path, metadata: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja to ``folder``, if the file has a tokenizer.

    Raises:
        SurgeryError: the tokenizer is damaged, or its type or pre-tokenizer is not supported.
    """
    kind = metadata.get(_MODEL)
    if kind is None:
        return
    if kind == "llama" and not str(metadata.get("general.architecture")).startswith("gemma"):
        _write_sentencepiece(path, folder)
    elif kind in ("gpt2", "llama"):
        try:
            _write_bpe(path, metadata, folder, _byte_level if kind == "gpt2" else _gemma)
        except SurgeryError:
            raise
        except Exception as error:  # damaged vocabularies raise various errors, plain exceptions from Rust included
            raise SurgeryError.at(path, f"damaged tokenizer ({error}); convert the model to GGUF again") from None
    else:
        raise SurgeryError.at(
            path, f"tokenizer type {kind!r} is not supported; use the Hugging Face checkpoint instead"
        )
    if template := metadata.get(_TEMPLATE):
        if not isinstance(template, str):
            raise SurgeryError.at(path, f"its chat template is {template!r}, not text; convert the model to GGUF again")
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_bpe(path: Path, metadata: dict[str, Any], folder: Path, build: Callable) -> None:
    """Write the tokenizer that ``build`` creates, with the special tokens and BOS that all types share."""
    from tokenizers import AddedToken, processors

    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise SurgeryError.at(path, "its tokenizer has no tokens; convert the model to GGUF again")
    special_tokens = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(index) is int and 0 <= index < len(tokens):
            special_tokens[f"{name}_token"] = tokens[index]
    tokenizer, begins = build(path, metadata, special_tokens.get("unk_token"))
    vocabulary = tokenizer.get_vocab()
    for token, kind in zip(tokens, metadata.get("tokenizer.ggml.token_type", []), strict=False):
        if kind in (_CONTROL, _USER_DEFINED) and token in vocabulary:
            special = kind == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    # Token ids must equal the model's; a duplicate token would shift the following ids.
    if tokenizer.get_vocab_size() != len(tokens):
        raise SurgeryError.at(
            path, f"duplicates among the {len(tokens)} tokens of its tokenizer; convert the model again"
        )
    if metadata.get("tokenizer.ggml.add_bos_token", begins) and "bos_token" in special_tokens:
        bos = special_tokens["bos_token"]
        before = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocabulary[bos])]
        )
        after = tokenizer.post_processor
        tokenizer.post_processor = processors.Sequence([after, before]) if after else before
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        **special_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _context(metadata),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _byte_level(path: Path, metadata: dict[str, Any], unknown: str | None) -> tuple[Tokenizer, bool]:
    """Build a byte-level BPE; also return whether it adds BOS by default."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    cut, tokens, merges = (metadata.get(key) for key in (_CUT, "tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
    if merges is None:
        raise SurgeryError.at(path, "its tokenizer has no merges; convert the model to GGUF again")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=cut in _WHOLE_FIRST))
    tokenizer.pre_tokenizer = _pre_tokenizer(path, cut)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, cut in _WHOLE_FIRST


def _gemma(path: Path, metadata: dict[str, Any], unknown: str | None) -> tuple[Tokenizer, bool]:
    """Build Gemma's character-level BPE with byte fallback; merges follow the order of tokens.

    Tokens that are runs of spaces become runs of the SentencePiece space symbol. BOS is added by default.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = [_SPACE * len(token) if not token.strip(" ") else token for token in metadata["tokenizer.ggml.tokens"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        pairs = [(token[:end], token[end:]) for end in range(len(token) - 1, 0, -1)]
        merges += [pair for pair in pairs if all(part in vocabulary for part in pair)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


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
    raise SurgeryError.at(
        path,
        f"pre-tokenizer {cut!r} ({_CUT}) is not supported (supported: {choices}); "
        "use the Hugging Face checkpoint instead",
    )


def _context(metadata: dict[str, Any]) -> int:
    return int(metadata.get(f"{metadata.get('general.architecture')}.context_length", 2048))


def _write_sentencepiece(path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # damaged vocabularies raise various errors
        reason = " ".join(str(error).split())[:200]
        raise SurgeryError.at(
            path, f"transformers cannot convert its tokenizer ({reason}); use the Hugging Face checkpoint"
        ) from None
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    # Local paths and internal entries of transformers.
    for name in ("gguf_file", "name_or_path", "is_local", "local_files_only"):
        fields.pop(name, None)
    config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
