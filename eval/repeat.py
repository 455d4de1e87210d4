"""Repeated spans: how much better a stretch of text is predicted where it comes again, by the distance.

Every row is natural text, in which one span of it returns after so many tokens as the lag says. Only attention over the
lag can know it, and it shows in the loss long before a model fails to find a planted fact, so that small models too
have something to lose. A loss on repeated random tokens is Olsson et al.'s measure of induction (arXiv:2209.11895).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import LongTensor, Tensor

from surgery.common.errors import SurgeryError
from surgery.eval.logits import LogitReader
from surgery.eval.sequences import random_windows
from surgery.eval.token_losses import losses_of_states

LAGS = (256, 512, 1024, 2048, 4096, 8192)
SPAN = 64
"""Tokens that come again."""
SKIPPED = 8
"""First tokens of the span that are not counted: nothing can know yet that it comes again."""
LEAD = 32
"""Tokens before the span's first occurrence."""


@dataclass(frozen=True)
class RepeatSet:
    """Rows of one lag.

    Attributes:
        tokens: [N, T] int64.
        first, second: where the span begins, and where it begins again.
    """

    tokens: LongTensor
    first: int
    second: int


def row_length(lag: int) -> int:
    """Tokens of a row, with room for a bos."""
    return 1 + LEAD + lag + SPAN


def repeat_rows(token_ids: Sequence[int] | np.ndarray, lag: int, count: int, seed: int, bos: int | None) -> RepeatSet:
    """`count` windows of the text, at whose ends a span of theirs comes again, `lag` tokens after its beginning.

    Raises:
        SurgeryError: the lag is shorter than the span, or the text than the rows.
    """
    if lag < SPAN:
        raise SurgeryError(f"a span of {SPAN} tokens cannot come again after {lag}: use a lag of {SPAN} at least")
    first = LEAD + (bos is not None)
    windows = random_windows(token_ids, count, first + lag, seed, bos)
    return RepeatSet(torch.cat([windows, windows[:, first : first + SPAN]], dim=1), first, first + lag)


def repeat_losses(reader: LogitReader, rows: RepeatSet, tokens: LongTensor) -> Tensor:
    """Mean losses [B, 2] in nats, fp64, of the counted tokens of the first and the second occurrence in `tokens`."""
    states = reader.states(tokens)
    found = []
    for start in (rows.first, rows.second):
        counted = slice(start + SKIPPED, start + SPAN)
        before = states[:, counted.start - 1 : counted.stop - 1]
        found.append(losses_of_states(reader, before, tokens[:, counted]).double().mean(1))
    return torch.stack(found, dim=1)
