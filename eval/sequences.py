"""Token sequences for evaluation: random windows of one long text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import LongTensor

from surgery.common.errors import SurgeryError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize `text` without bos or eos, and without the warning that it exceeds the model's context length."""
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def random_windows(
    token_ids: Sequence[int] | np.ndarray, count: int, length: int, seed: int, bos: int | None
) -> LongTensor:
    """Draw `count` windows [count, length] int64 of one long text at uniformly random offsets; windows may overlap.

    With `bos`, a window is that token and `length - 1` tokens of text. Equal arguments give equal windows, on every
    machine. Raises SurgeryError: `count` is below 1, `length` below 2, or the text has no more than `length` tokens.
    """
    if count < 1 or length < 2:
        raise SurgeryError(f"cannot draw {count} windows of {length} tokens: at least 1 of at least 2 tokens is needed")
    check_longer_than(len(token_ids), length)
    token_ids = np.asarray(token_ids)
    prefix = [] if bos is None else [bos]
    rng = random.Random(seed)
    starts = [rng.randint(0, len(token_ids) - length - 1) for _ in range(count)]
    rows = [prefix + token_ids[start : start + length - len(prefix)].tolist() for start in starts]
    return torch.tensor(rows, dtype=torch.long)


def check_longer_than(available: int, length: int, text: str = "the text") -> None:
    """Raise SurgeryError unless `text` of `available` tokens has room for a random window of `length` tokens."""
    if available <= length:
        raise SurgeryError(
            f"{text} has {available} tokens, too few for windows of {length}: use a longer text or a smaller length"
        )
