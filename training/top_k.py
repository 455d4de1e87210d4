"""Top-k teacher distributions: the k most likely tokens, and one bucket for all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import LongTensor, Tensor
from torch.nn.functional import log_softmax

from surgery.training.chunks import LOGIT_BYTES, States, chunk_count

LEAST = -87.0
"""Smallest log-probability stored: below it, the exponential is subnormal in fp32."""


@dataclass(frozen=True)
class TopK:
    """Teacher distributions at temperature 1, each as its top k tokens and one bucket for the rest.

    Log-probabilities are stored, which half precision represents best where the probability is high. The rest is stored
    in fp32, since 1 minus the sum of rounded probabilities would be noise.

    Attributes:
        values: [..., k] log-probabilities of the k most likely tokens, float16 (or wider), at least `LEAST`.
        ids: [..., k] int32 ids of these tokens.
        rest: [...] log-probability of any other token, float32 (or wider), at least `LEAST`.
        vocabulary: vocabulary size V, above k.
    """

    values: Tensor
    ids: Tensor
    rest: Tensor
    vocabulary: int

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensor fields by name."""
        return {"values": self.values, "ids": self.ids, "rest": self.rest}

    def map(self, function: Callable[[Tensor], Tensor]) -> TopK:
        """Apply a function to each tensor."""
        return self.of({name: function(tensor) for name, tensor in self.tensors().items()})

    def of(self, tensors: Mapping[str, Tensor]) -> TopK:
        """Create distributions over the same vocabulary from other tensors."""
        return TopK(**tensors, vocabulary=self.vocabulary)

    def to(self, device: torch.device) -> TopK:
        """Return the distributions on a device."""
        return self.map(lambda tensor: tensor.to(device))


@torch.no_grad()
def top_k(teacher: States, k: int, dtype: torch.dtype = torch.float16, max_bytes: int = LOGIT_BYTES) -> TopK:
    """Compute a teacher's top-k distributions at N positions, 0 < k < V.

    ``max_bytes`` limits the fp32 logits of a chunk of positions.
    """
    vocabulary = teacher.vocabulary()
    values, ids, rest = [], [], []
    for hidden in teacher.hidden.tensor_split(chunk_count(len(teacher.hidden), vocabulary, max_bytes)):
        logs = log_softmax(teacher._replace(hidden=hidden).logits(), dim=-1)
        top_logs, names = logs.topk(k, dim=-1)
        values.append(top_logs.clamp(min=LEAST).to(dtype))
        ids.append(names.int())
        rest.append(_others(logs, names).clamp(min=LEAST))
    return TopK(torch.cat(values), torch.cat(ids), torch.cat(rest), vocabulary)


def buckets(logits: Tensor, teacher: TopK) -> tuple[Tensor, Tensor]:
    """Reduce student and teacher to distributions over the same k + 1 outcomes: the teacher's k tokens and "any other".

    `logits` are the student's [N, V], fp32 or fp64, with gradients. The teacher's are renormalized, since rounding
    changes their sum. Returns log-probabilities [N, k + 1] of both in the dtype of ``logits``.
    """
    ids = teacher.ids.long()
    values, rest = teacher.values.to(logits.dtype), teacher.rest.to(logits.dtype)
    logs = log_softmax(logits, dim=-1)
    top_logs = logs.gather(1, ids)
    student = torch.cat([top_logs, _others(logs, ids)[:, None]], dim=1)
    return student, log_softmax(torch.cat([values, rest[:, None]], dim=1), dim=-1)


def _others(logs: Tensor, ids: LongTensor) -> Tensor:
    """Compute the log-probability [N] of all tokens but ``ids`` [N, k] from ``logs`` [N, V]."""
    return logs.scatter(1, ids, -torch.inf).logsumexp(dim=1)
