"""The teacher's likeliest tokens at a position, and all others as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import LongTensor, Tensor
from torch.nn.functional import log_softmax

from surgery.common.errors import SurgeryError
from surgery.training.chunks import LOGIT_BYTES, States, chunk_count
from surgery.training.data import moved

LEAST = -87.0
"""The smallest log-probability that is kept: the exponential of less is no normal fp32 number."""


@dataclass(frozen=True)
class TopK:
    """The distributions of a teacher at temperature 1, each as k tokens by name and one bucket for the rest.

    The logits of the tokens less their logsumexp are kept, which half precision holds best where the probability is
    high; the rest is its own number in fp32, since 1 less the rounded others would be noise.

    Attributes:
        values: [..., k] log-probabilities of the k likeliest tokens, float16 (or wider), at least `LEAST`.
        ids: [..., k] int32, those tokens.
        rest: [...] float32 (or wider), log-probability that it is any other token, at least `LEAST`.
        vocabulary: V. With k = V there are no others, and `rest` is not read.
    """

    values: Tensor
    ids: Tensor
    rest: Tensor
    vocabulary: int

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name: everything but the vocabulary."""
        return {"values": self.values, "ids": self.ids, "rest": self.rest}

    def map(self, function: Callable[[Tensor], Tensor]) -> TopK:
        """Apply a function to each tensor."""
        return self.of({name: function(tensor) for name, tensor in self.tensors().items()})

    def of(self, tensors: Mapping[str, Tensor]) -> TopK:
        """The distributions over the same vocabulary that these tensors hold."""
        return TopK(**tensors, vocabulary=self.vocabulary)

    def to(self, device: torch.device) -> TopK:
        """Return the same on another device."""
        return self.map(lambda tensor: moved(tensor, device))

    @property
    def whole(self) -> bool:
        """Return whether it has the logits of the whole vocabulary."""
        return self.values.shape[-1] == self.vocabulary


@torch.no_grad()
def top_k(teacher: States, k: int, dtype: torch.dtype = torch.float16, max_bytes: int = LOGIT_BYTES) -> TopK:
    """The distributions of a teacher at N positions; its logits exist for a few of them at a time.

    Args:
        k: tokens by name.
        dtype: of their log-probabilities.
        max_bytes: of one chunk's fp32 logits.

    Raises:
        SurgeryError: k is not in 1 … V.
    """
    vocabulary = teacher.vocabulary()
    if not 1 <= k <= vocabulary:
        raise SurgeryError(f"the top {k} tokens of a vocabulary of {vocabulary}: give 1 to {vocabulary}")
    values, ids, rest = [], [], []
    for hidden in teacher.hidden.tensor_split(chunk_count(len(teacher.hidden), vocabulary, max_bytes)):
        logs = log_softmax(teacher._replace(hidden=hidden).logits(), dim=-1)
        top_logs, names = logs.topk(k, dim=-1)
        values.append(top_logs.clamp(min=LEAST).to(dtype))
        ids.append(names.int())
        rest.append(_others(logs, names).clamp(min=LEAST))
    return TopK(torch.cat(values), torch.cat(ids), torch.cat(rest), vocabulary)


def buckets(logits: Tensor, teacher: TopK) -> tuple[Tensor, Tensor]:
    """Student and teacher as distributions over the same k + 1 outcomes: k tokens and "any other", if there are others.

    Args:
        logits: [N, V] of the student, fp32 or fp64; gradients pass.
        teacher: at the same N positions. What rounding left of its sum is divided out.

    Returns:
        Log-probabilities [N, k + 1] of both in the dtype of ``logits``, [N, k] where k = V.
    """
    ids = teacher.ids.long()
    values, rest = teacher.values.to(logits.dtype), teacher.rest.to(logits.dtype)
    logs = log_softmax(logits, dim=-1)
    top_logs = logs.gather(1, ids)
    if teacher.whole:
        return top_logs, log_softmax(values, dim=-1)
    student = torch.cat([top_logs, _others(logs, ids)[:, None]], dim=1)
    return student, log_softmax(torch.cat([values, rest[:, None]], dim=1), dim=-1)


def _others(logs: Tensor, ids: LongTensor) -> Tensor:
    """Log-probability [N] of all tokens but ``ids`` [N, k], of log-probabilities [N, V]; -inf if there are none."""
    return logs.scatter(1, ids, -torch.inf).logsumexp(dim=1)
