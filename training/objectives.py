"""Objectives of healing: divergence from the teacher's distribution, and cross-entropy, in chunks of positions.

The divergence is KL = Σ P (log P - log Q), with P the teacher's distribution over the next token and Q the student's.
Both losses are means over positions, in nats, computed in fp32 (fp64 for fp64 heads) from logits in the head's dtype.

Gradients reach the student's hidden states and its head. Against the top-k tokens of a teacher (`top_k.TopK`), KL
compares distributions over k + 1 outcomes: the k tokens and "any other". This is a lower bound of the divergence over
the vocabulary, by the data processing inequality.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import LongTensor, Tensor
from torch.nn.functional import cross_entropy as token_cross_entropy
from torch.nn.functional import log_softmax

from surgery.training.chunks import States, chunk_count, summed_over_chunks
from surgery.training.settings import ObjectiveWeights
from surgery.training.top_k import TopK, buckets

Teacher = States | TopK
"""Teacher at the student's positions: hidden states with a head, or cached top-k logits."""

ON_LOGITS = ("kl", "cross_entropy")


def logit_losses(
    weights: ObjectiveWeights,
    student: States,
    teacher: Teacher | None = None,
    targets: LongTensor | None = None,
    *,
    chunks: int | None = None,
    positions: float | None = None,
) -> dict[str, Tensor]:
    """Compute the unweighted losses on logits in one pass over the positions: scalars by name, 0 if N is 0.

    Args:
        student, teacher: states at the N predicting positions, or the teacher's top-k logits, which get no gradient.
        targets: [N] int64 next tokens; None if no loss needs them.
        chunks: number of chunks; None for `chunk_count` of N. With a sharded head all processes must pass the same.
        positions: divisor of the sums; None for N. To weigh all positions of a global batch equally, pass their number
            divided by the number of gradients that are averaged (processes times accumulated batches).

    """
    names = [name for name in ON_LOGITS if getattr(weights, name)]
    if not names:
        return {}
    vocabulary, count = student.vocabulary(), len(student.hidden)
    columns = {"hidden": student.hidden}
    if weights.kl and isinstance(teacher, TopK):
        columns |= teacher.tensors()
    elif weights.kl:
        columns["teacher"] = teacher.hidden.detach()
    if weights.cross_entropy:
        columns["targets"] = targets

    def sums(*pieces: Tensor) -> Tensor:
        chunk = dict(zip(columns, pieces, strict=True))
        logits = student._replace(hidden=chunk["hidden"]).logits()
        losses = {"kl": _divergence(logits, teacher, chunk)} if weights.kl else {}
        if weights.cross_entropy:
            losses["cross_entropy"] = token_cross_entropy(logits, chunk["targets"], reduction="sum")
        return torch.stack([losses[name] for name in names])

    chunks = chunk_count(count, vocabulary) if chunks is None else chunks
    loss_sums = summed_over_chunks(sums, list(columns.values()), chunks)
    means = loss_sums / (max(count, 1) if positions is None else positions)
    return dict(zip(names, means.unbind(), strict=True))


def combine(weights: ObjectiveWeights, parts: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted sum of scalar losses with gradients, and the unweighted losses, detached."""
    total = torch.stack([getattr(weights, name) * parts[name].float() for name in weights.parts()]).sum()
    return total, {name: part.detach() for name, part in parts.items()}


def _divergence(logits: Tensor, teacher: Teacher, chunk: Mapping[str, Tensor]) -> Tensor:
    """Compute the KL divergence of a chunk, summed over positions."""
    if isinstance(teacher, TopK):
        student, target = buckets(logits, teacher.of({name: chunk[name] for name in teacher.tensors()}))
    else:
        with torch.no_grad():
            target = log_softmax(teacher._replace(hidden=chunk["teacher"]).logits().to(logits.device), dim=-1)
        student = log_softmax(logits, dim=-1)
    return (target.exp() * (target - student)).sum()
