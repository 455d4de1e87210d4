"""Conversion of a GGUF file's tokenizer to Hugging Face tokenizer files.

The rules are those of llama.cpp's ``src/llama-vocab.cpp``. The conversion of transformers 5.24 fails for SentencePiece
files without merges, which llama.cpp reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.checkpoint.disk import read_json_or_empty
from surgery.common.errors import SurgeryError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MODEL, _CUT, _TEMPLATE = "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"
_SPACE = "\u2581"  # stands for a space in SentencePiece vocabularies
_CONTROL, _USER_DEFINED = 3, 4  # token types that are matched before merges
_SENTENCEPIECE_IDS = {
    f"tokenizer.ggml.{name}_token_id": index for name, index in (("unknown", 0), ("bos", 1), ("eos", 2))
}
"""Ids that llama.cpp assumes for SentencePiece vocabularies if the file has none."""
_PHI3_KEEPS = ("<unk>", "<s>", "<|endoftext|>")
"""Added tokens of Phi-3 that do not strip the spaces after them."""

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

    Raises SurgeryError: the tokenizer is damaged, or its type or pre-tokenizer is not supported.
    """
    kind, template = metadata.get(_MODEL), metadata.get(_TEMPLATE)
    if kind is None:
        return
    architecture = metadata.get("general.architecture")
    # transformers loads every tokenizer of a qwen2 model as byte-level BPE, whatever class its files name.
    if kind not in ("gpt2", "llama") or (kind, architecture) == ("llama", "qwen2"):
        raise SurgeryError.at(
            path,
            f"tokenizer type {kind!r} is not supported for {architecture!r}; use the Hugging Face checkpoint instead",
        )
    if template and not isinstance(template, str):
        raise SurgeryError.at(path, f"its chat template is {template!r}, not text; convert the model to GGUF again")
    try:
        if kind == "gpt2":
            files = _files(path, metadata, _byte_level)
        else:
            files = _files(path, _SENTENCEPIECE_IDS | metadata, _sentencepiece)
    except SurgeryError:
        raise
    except Exception as error:  # damaged vocabularies raise various errors, plain exceptions from Rust included
        raise SurgeryError.at(path, f"damaged tokenizer ({error}); convert the model to GGUF again") from None
    for name, text in (files | ({"chat_template.jinja": template} if template else {})).items():
        (folder / name).write_text(text, encoding="utf-8")


def _files(path: Path, metadata: dict[str, Any], build: Callable) -> dict[str, str]:
    """Return the files of the tokenizer that ``build`` creates, with added tokens, BOS and EOS that all types share."""
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
    # GGUF does not store which tokens strip spaces; llama.cpp goes by the model's name.
    strips = any(name in str(metadata.get("general.name")).lower() for name in ("phi-3", "phi3"))
    for token, kind in zip(tokens, metadata.get("tokenizer.ggml.token_type", []), strict=False):
        if kind in (_CONTROL, _USER_DEFINED) and token in vocabulary:
            special, rstrip = kind == _CONTROL, strips and token not in _PHI3_KEEPS
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False, rstrip=rstrip)])
    # Token ids must equal the model's; a duplicate token would shift the following ids.
    if tokenizer.get_vocab_size() != len(tokens):
        raise SurgeryError.at(
            path, f"duplicates among the {len(tokens)} tokens of its tokenizer; convert the model again"
        )
    around = [
        [special_tokens[name]] if metadata.get(f"tokenizer.ggml.add_{name}", default) and name in special_tokens else []
        for name, default in (("bos_token", begins), ("eos_token", False))
    ]
    if any(around):
        first, last = around
        single, second = [*first, "$A", *last], [*first, "$B", *last]
        ends = processors.TemplateProcessing(
            single=single,
            pair=[*single, *(f"{part}:1" for part in second)],
            special_tokens=[(token, vocabulary[token]) for token in {*first, *last}],
        )
        split = tokenizer.post_processor
        tokenizer.post_processor = processors.Sequence([split, ends]) if split else ends
    config = {
        **special_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata.get(f"{metadata.get('general.architecture')}.context_length", 2048)),
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


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


def _sentencepiece(path: Path, metadata: dict[str, Any], unknown: str | None) -> tuple[Tokenizer, bool]:
    """Build a character-level BPE with byte fallback, by llama.cpp's ``llm_tokenizer_spm``; BOS is added by default.

    Pairs merge in the order of the scores of the merged tokens. Text at the start, and after each special token, gets a
    space in front unless ``add_space_prefix`` is false.

    Gemma's scores do not give the order of its merges, so the order of tokens does. Its tokens that are runs of spaces
    become runs of the SentencePiece space symbol, and no space is added unless the file says so.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = metadata["tokenizer.ggml.tokens"]
    gemma = str(metadata.get("general.architecture")).startswith("gemma")
    if gemma:
        tokens = order = [_SPACE * len(token) if not token.strip(" ") else token for token in tokens]
    else:
        scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
        order = sorted(tokens, key=scores.__getitem__, reverse=True)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token in order:
        pairs = [(token[:end], token[end:]) for end in range(len(token) - 1, 0, -1)]
        merges += [pair for pair in pairs if all(part in vocabulary for part in pair)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", not gemma):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), tokenizer.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
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


def pre_tokenizer_name(folder: Path) -> str | None:
    """Return llama.cpp's name of the splitting in a folder's tokenizer.json.

    None if it has no such name, or if there is no such file with a byte-level BPE.
    """
    file = folder / "tokenizer.json"
    return _pre_tokenizer_name(file, file.stat().st_mtime_ns) if file.is_file() else None


@cache
def _pre_tokenizer_name(file: Path, modified: int) -> str | None:
    """Return `pre_tokenizer_name` of a file as of a time in ns; cached, since parsing megabytes takes 0.1 s."""
    try:
        document = read_json_or_empty(file)
        model, pre = document["model"], document.get("pre_tokenizer") or {}
        steps = pre.get("pretokenizers", [pre])
        shape, last = tuple(step.get("type") for step in steps), steps[-1]
        if (
            model["type"] != "BPE"
            or model.get("byte_fallback")
            or shape[-1] != "ByteLevel"
            or last.get("add_prefix_space")
        ):
            return None
        whole, name = last.get("use_regex", True), None
        if shape == ("ByteLevel",) and whole:
            name = "gpt-2"
        elif shape == ("Digits", "ByteLevel") and whole and steps[0].get("individual_digits"):
            name = "smollm"
        elif shape == ("Split", "ByteLevel") and not whole:
            pattern = steps[0].get("pattern", {}).get("Regex")
            name = next((name for name, split in SPLITS.items() if split == pattern), None)
        normalizer = (document.get("normalizer") or {}).get("type")
    except (SurgeryError, AttributeError, LookupError, TypeError):  # damaged
        return None
    return name if normalizer is None or (name, normalizer) == ("qwen2", "NFC") else None
