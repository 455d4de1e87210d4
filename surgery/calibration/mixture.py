"""Calibration sequences of several kinds of text: prose, code, the model's conversations, the user's files.

Each sequence is of one kind, and kinds are interleaved, so that the first few sequences have the shares of all.
Held-out prose and code come from `surgery.calibration.installed`, held-out conversations from other prompts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import LongTensor
from transformers import PreTrainedTokenizerBase

from surgery.calibration.installed import installed_code, installed_docstrings, installed_prose
from surgery.calibration.planted import Wording, in_code, in_prose
from surgery.calibration.prose import builtin_prose
from surgery.calibration.sequences import (
    CalibrationSet,
    Pool,
    SequenceRequest,
    Windows,
    build_calibration,
    fill,
    lacks,
    pool_size,
    token_hash,
    tokenized,
)
from surgery.calibration.text import BUILTIN, CHAT, CODE, DOCSTRINGS, PROSE, iter_documents
from surgery.common.errors import SurgeryError

DEFAULT: Mapping[str, float] = {PROSE: 0.5, CODE: 0.3, CHAT: 0.2}
SMALL_VOCABULARY = 8_192
"""Tokenizers with fewer tokens belong to models of one kind of text, such as the demo model, which reads Python."""

SHARES = re.compile(r"[^=,]+=[0-9.]+(,[^=,]+=[0-9.]+)*")

Conversations = Callable[[bool, int], list[list[int]]]
"""Function of (held out, tokens) that returns token ids of conversations, of at least ``tokens`` tokens in total."""


def shares_of(calibration: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, float] | None:
    """Parse a calibration setting such as "prose=0.5,code=0.25,notes.txt=0.25"; None if it names one plain source.

    Returned shares sum to 1. "builtin" is `DEFAULT`, with prose in place of conversations if the tokenizer has no chat
    template; for a tokenizer of less than `SMALL_VOCABULARY` tokens it is a plain source. Raises SurgeryError: a share
    is not a number, none is positive, or "chat" is given without a chat template.
    """
    chats = bool(getattr(tokenizer, "chat_template", None))
    if calibration == BUILTIN:
        if len(tokenizer) < SMALL_VOCABULARY:
            return None
        return dict(DEFAULT) if chats else without_chat(DEFAULT)
    if calibration in (CHAT, *TEXTS):
        shares = {calibration: 1.0}
    elif SHARES.fullmatch(calibration.replace(" ", "")):
        shares = _parsed(calibration.replace(" ", ""))
    else:
        return None
    if CHAT in shares and not chats:
        raise SurgeryError(
            f"calibration {calibration}: the tokenizer has no chat template; omit {CHAT}", setting="calibration"
        )
    return shares


def _parsed(calibration: str) -> dict[str, float]:
    shares = {}
    for part in calibration.split(","):
        name, _, value = part.partition("=")
        try:
            shares[name] = float(value)
        except ValueError:
            raise SurgeryError(
                f"calibration {calibration}: {value!r} is not a number; write shares like prose=0.5,code=0.5",
                setting="calibration",
            ) from None
    shares = {name: share for name, share in shares.items() if share > 0}
    if not shares:
        raise SurgeryError(
            f"calibration {calibration}: all shares are 0; at least one must be above 0", setting="calibration"
        )
    return {name: share / sum(shares.values()) for name, share in shares.items()}


def without_chat(shares: Mapping[str, float]) -> dict[str, float]:
    """Return the shares with prose in place of conversations."""
    rest = {name: share for name, share in shares.items() if name != CHAT}
    if CHAT in shares:
        rest[PROSE] = rest.get(PROSE, 0.0) + shares[CHAT]
    return rest


def build_mixture(
    tokenizer: PreTrainedTokenizerBase,
    shares: Mapping[str, float],
    conversations: Conversations,
    request: SequenceRequest,
) -> CalibrationSet:
    """Build calibration and held-out sequences of several kinds of text, by their shares of the sequences.

    ``conversations`` returns those for "chat", which get no planted facts. The description has the fields of
    `build_calibration`, "parts" (share, sequences and documents by source) and "order", the source of each sequence.
    Raises SurgeryError as `build_calibration`.
    """
    order, other_order = _interleaved_order(shares, request.count), _interleaved_order(shares, request.held_out)
    drawn: dict[str, Iterator[LongTensor]] = {}
    other: dict[str, Iterator[LongTensor]] = {}
    parts = {}
    for name, share in shares.items():
        count, others = order.count(name), other_order.count(name)
        if name == CHAT:
            built = _chat_part(tokenizer, conversations, count, others, request.length)
        elif name in TEXTS:
            built = named_text(tokenizer, name, count, others, request)
        else:
            part = replace(request, tokens=max(count, 1) * request.length, held_out=others)
            built = build_calibration(tokenizer, name, part)
        drawn[name], other[name] = iter(built.tokens), iter(built.held_out)
        facts = {name: built.description[name] for name in ("documents", "held_out_documents", "held_out_source")}
        parts[name] = {"share": share, "sequences": count, "held_out_sequences": others, **facts}
    calibration = torch.stack([next(drawn[name]) for name in order])
    unseen = [next(other[name]) for name in other_order]
    held_out_tokens = torch.stack(unseen) if unseen else calibration[:0]
    description = {
        "source": ",".join(f"{name}={share:.4g}" for name, share in shares.items()),
        "tokenizer": tokenizer.name_or_path,
        "seed": request.seed,
        "length": request.length,
        "sequences": len(calibration),
        "held_out_sequences": request.held_out,
        "tokens": calibration.numel(),
        "recall": request.recall,
        "parts": parts,
        "order": {"calibration": order, "held_out": other_order},
        "sha256": token_hash(calibration),
        "held_out_sha256": token_hash(held_out_tokens),
    }
    return CalibrationSet(calibration, held_out_tokens, description)


def _interleaved_order(shares: Mapping[str, float], count: int) -> list[str]:
    """Return the source of each of ``count`` sequences, always the one furthest below its share."""
    order: list[str] = []
    for index in range(1, count + 1):
        order.append(max(shares, key=lambda name: shares[name] * index - order.count(name)))
    return order


TEXTS: dict[str, tuple[Callable[[int], Iterator[str]], Callable[[int], Iterator[tuple[str, str]]], Wording]] = {
    PROSE: (builtin_prose, installed_prose, in_prose),
    DOCSTRINGS: (installed_docstrings, installed_prose, in_prose),
    CODE: (lambda seed: iter_documents(BUILTIN, seed=seed), installed_code, in_code),
}
"""By kind of text: calibration documents, held-out documents with their distributions, wording of facts."""


def named_text(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    count: int,
    held_out: int,
    request: SequenceRequest,
    *,
    bos: int | Literal["tokenizer"] | None = "tokenizer",
) -> CalibrationSet:
    """Build ``count`` sequences of one of `TEXTS` and held-out ones of installed text, as `build_calibration` does."""
    documents, unseen, wording = TEXTS[name]
    length, recall, seed = request.length, request.recall, request.seed
    calibration, other = Pool(pool_size(count, length)), Pool(pool_size(held_out, length))
    sources: list[str] = []

    def unseen_texts() -> Iterator[str]:
        for distribution, text in unseen(seed):
            sources.append(distribution)
            yield text

    if held_out:
        fill(Pool(0), other, tokenized(tokenizer, unseen_texts()))
    if lacks(other):
        # Too few packages with long descriptions: hold out other documents of the calibration text.
        sources.clear()
        other = Pool(other.target)
        fill(calibration, other, tokenized(tokenizer, documents(seed)))
    elif count:
        fill(calibration, Pool(0), tokenized(tokenizer, documents(seed)))
    for pool in (calibration, other):
        if lacks(pool):
            raise SurgeryError(
                f"not enough {name} text for {count} sequences of {length} tokens; reduce --calibration-tokens or "
                "--calibration-length, or use your own text"
            )
    bos = tokenizer.bos_token_id if bos == "tokenizer" else bos
    windows = Windows(length, recall, bos, tokenizer, random.Random(seed), wording)
    drawn = windows.draw(calibration, count)
    description = {
        "documents": calibration.documents,
        "held_out_documents": other.documents,
        "held_out_source": sorted(set(sources)) or "the same text, other documents",
    }
    return CalibrationSet(drawn, windows.draw(other, held_out), description)


def _chat_part(
    tokenizer: PreTrainedTokenizerBase, conversations: Conversations, count: int, held_out: int, length: int
) -> CalibrationSet:
    """Concatenate conversations and cut them into sequences; none is used twice."""
    rows, documents = [], []
    for unseen, number in ((False, count), (True, held_out)):
        part = conversations(unseen, number * length) if number else []
        ids = [token for conversation in part for token in conversation]
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        ids = ids[1:] if ids[:1] == bos else ids
        size = length - len(bos)
        cut = [bos + ids[index * size : (index + 1) * size] for index in range(number)]
        rows.append(torch.tensor(cut, dtype=torch.long).reshape(number, length))
        documents.append(len(part))
    described = {"documents": documents[0], "held_out_documents": documents[1], "held_out_source": "other prompts"}
    return CalibrationSet(*rows, described)
