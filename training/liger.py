"""The fused losses of liger-kernel (arXiv:2410.10989), for heads that do not train.

They make a chunk's gradient while they make its loss, so that nothing is computed again in the backward pass. They are
given chunks all the same: the divergence holds the fp32 loss of every token of the vocabulary at every position that it
is given. With heads that train it would also hold a gradient of the head's size for every chunk, hence the condition.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import LongTensor, Tensor, nn
from torch.distributed.tensor import DTensor

from surgery.common.errors import SurgeryError
from surgery.training.chunks import Head, States


def check() -> None:
    """Raises SurgeryError where liger-kernel is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise SurgeryError("liger-kernel is asked for and not installed: pip install liger-kernel, or leave it off")


def fits(states: States) -> bool:
    """Whether the fused losses compute of these states what this package's own do.

    The head is a whole weight without bias, hooks or adapters, and takes no gradient; the states are at most fp32 and
    where Triton runs: on a GPU, or anywhere under its interpreter (TRITON_INTERPRET=1).
    """
    weight = _weight(states.head)
    device = states.hidden.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return device and weight is not None and weight.dtype == states.hidden.dtype and weight.dtype != torch.float64


def divergence(student: States, teacher: States, beta: float, temperature: float) -> Tensor:
    """τ² times the sum over positions of what `objectives` calls JSD(β): forward KL for β = 0, reverse for β = 1."""
    from liger_kernel.transformers.functional import liger_fused_linear_jsd

    rows = len(student.hidden)
    if not rows:
        return student.hidden.sum().float()
    pairs = (student.hidden, _weight(student.head), teacher.hidden, _weight(teacher.head))
    return temperature**2 * rows * liger_fused_linear_jsd(*pairs, None, beta, -100, temperature)


def cross_entropy(student: States, targets: LongTensor) -> Tensor:
    """The sum over positions of the cross-entropy of ``targets`` [N]."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    if not len(targets):
        return student.hidden.sum().float()
    return liger_fused_linear_cross_entropy(student.hidden, _weight(student.head), targets, reduction="sum").float()


def _weight(head: Head) -> Tensor | None:
    """The weight [V, D] that is all of a head; None where it is more, elsewhere, or takes a gradient."""
    if type(head) is nn.Linear and head.bias is None and not (head._forward_hooks or head._forward_pre_hooks):
        # ZeRO-3 leaves an empty weight between calls of the module.
        head = head.weight if head.weight.shape == (head.out_features, head.in_features) else None
    plain = isinstance(head, Tensor) and not isinstance(head, DTensor) and not head.requires_grad
    return head if plain else None
