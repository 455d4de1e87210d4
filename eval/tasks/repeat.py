"""Task `repeat`: how much better a stretch of text is predicted where it comes again, by the distance.

Every row is natural text, in which one span of it returns after so many tokens as the lag says. Only attention over the
lag can know it, and it shows in the loss long before a model fails to find a planted fact, so that small models too
have something to lose. A loss on repeated random tokens is Olsson et al.'s measure of induction (arXiv:2209.11895).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.bootstrap import paired_difference
from surgery.eval.logits import LogitReader, evaluation_mode
from surgery.eval.sequences import random_windows
from surgery.eval.session import Session
from surgery.eval.token_losses import losses_of_states
from surgery.eval.work import Work, at_most, reading

if TYPE_CHECKING:
    from surgery.evaluation.task_data import TaskData


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


TOKENS_AT_ONCE = 8_192
"""Tokens of a batch at most, if there is more than one row: rows of long lags are measured one by one."""


@dataclass(frozen=True)
class RepeatTask:
    """Losses of both occurrences of a span.

    Attributes:
        rows: by lag.
    """

    rows: dict[int, RepeatSet]
    name: ClassVar[str] = "repeat"
    native: ClassVar[bool] = False

    def settings(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for rows in self.rows.values():
            digest.update(rows.tokens.numpy().tobytes())
        return {
            "lags": list(self.rows),
            "rows": [len(rows.tokens) for rows in self.rows.values()],
            "span": SPAN,
            "skipped": SKIPPED,
            "data_sha256": digest.hexdigest(),
        }

    def work(self, session: Session) -> dict[str, Work]:
        done = {}
        for lag, rows in self.rows.items():
            count, length = rows.tokens.shape
            done[_phase(lag)] = reading(at_most(count, session.limit), length, _batch(session, length))
        return done

    @torch.no_grad()
    def run(self, model: PreTrainedModel, session: Session, kept: None = None) -> dict[str, Any]:
        """Returns "lags": for each, mean losses "first" and "second" and "per_row" the second ones, and "change", the
        second minus the first with its interval; "loss": mean of the second ones over lags, "change" likewise."""
        lags = {str(lag): self._measure(model, session, lag, rows) for lag, rows in self.rows.items()}
        means = {key: _mean([found[key] for found in lags.values()]) for key in ("first", "second")}
        return {"lags": lags, "loss": means["second"], "change": means["second"] - means["first"]}

    def _measure(self, model: PreTrainedModel, session: Session, lag: int, rows: RepeatSet) -> dict[str, Any]:
        tokens = rows.tokens[: session.limit]
        batches = list(tokens.split(_batch(session, tokens.shape[1])))
        with evaluation_mode(model), session.progress.phase(_phase(lag), len(batches), "batch") as done:
            reader = LogitReader(model, tokens)
            found = session.processes.map(lambda batch: repeat_losses(reader, rows, batch).tolist(), batches, done)
        first, second = zip(*(pair for batch in found for pair in batch), strict=True)
        return {
            "first": _mean(first),
            "second": _mean(second),
            "change": asdict(paired_difference(second, first, seed=session.seed)),
            "per_row": list(second),
        }


def _phase(lag: int) -> str:
    return f"repeat, lag {lag}"


def _batch(session: Session, length: int) -> int:
    return min(session.batch_size, max(1, TOKENS_AT_ONCE // length))


def _mean(values: Any) -> float:
    return sum(values) / len(values)


def build(data: TaskData) -> RepeatTask:
    """From the settings and texts of an evaluation."""
    asked, ids = data.settings, data.text.ids.numpy()
    most = min(data.limit or LAGS[-1] * 2, len(ids) - 1)
    lags = asked.repeat_lags or tuple(lag for lag in LAGS if row_length(lag) <= most)
    if not lags:
        raise SurgeryError(f"repeat: {most} tokens of text and context are too few for the shortest lag, {LAGS[0]}")
    bos = data.tokenizer.bos_token_id
    return RepeatTask({lag: repeat_rows(ids, lag, asked.repeat_rows, asked.seed, bos) for lag in lags})
