"""What healing minimises: divergences from the teacher's distribution, and cross-entropy, on logits never held whole.

With P the teacher's distribution over the next token and Q the student's, both at temperature τ (softmax of logits/τ):

    forward KL    τ² Σ P (log P - log Q)                                     Hinton et al., arXiv:1503.02531
    reverse KL    τ² Σ Q (log Q - log P)                                     Gu et al., MiniLLM, arXiv:2306.08543
    JSD(β)        τ² [β KL(P ‖ M) + (1 - β) KL(Q ‖ M)],  M = βP + (1 - β)Q     Agarwal et al., GKD, arXiv:2306.13649

τ² keeps the gradients' size as τ changes. JSD(β)/β tends to the forward KL for β → 0 and JSD(β)/(1 - β) to the reverse
for β → 1, so that JSD itself tends to 0 at both ends; at β = 0 and 1 exactly it is defined here, as elsewhere, as the
forward and the reverse KL. Cross-entropy is at temperature 1. All are means over positions, in nats, computed in fp32
(fp64 for fp64 heads) of logits that the heads make in their own dtype.

Gradients reach the student's hidden states and its head. Against a teacher of which only the top k tokens are known
(`top_k.TopK`) all three compare distributions over k + 1 outcomes, the k tokens and "any other". That is never more
than the divergence over the whole vocabulary, since merging outcomes loses what tells them apart, and equal to it for
k = V.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, log

import torch
from torch import BoolTensor, LongTensor, Tensor
from torch.nn.functional import cross_entropy as token_cross_entropy
from torch.nn.functional import log_softmax

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import FileSettings
from surgery.training import liger as fused
from surgery.training.chunks import States, chunk_count, summed_over_chunks
from surgery.training.top_k import TopK, buckets

Teacher = States | TopK
"""A teacher that is resident, at the student's positions, or what was kept of it."""

DISTILLED = ("kl", "reverse_kl", "jsd")
ON_LOGITS = (*DISTILLED, "cross_entropy")
PARTS = (*ON_LOGITS, "hidden", "attention", "layerwise")


@dataclass(frozen=True)
class ObjectiveWeights(FileSettings):
    """The factors of the parts of the loss; a part of weight 0 is not computed.

    Attributes:
        kl, reverse_kl, jsd, cross_entropy: of the losses above.
        jsd_beta: β of the JSD, 0 to 1.
        temperature: τ of the first three.
        hidden, attention: of `matching.matching_loss` on the layers' and on the attentions' outputs.
        layerwise: of the same on the attentions' outputs, where each runs on its teacher's input, so that every layer
            trains for itself (CSKV, arXiv:2409.10593): a stage of its own, without other losses.

    Raises:
        SurgeryError: a value is out of its range, or all weights are 0.
    """

    kl: float = 1.0
    reverse_kl: float = 0.0
    jsd: float = 0.0
    jsd_beta: float = 0.5
    temperature: float = 1.0
    cross_entropy: float = 0.0
    hidden: float = 0.0
    attention: float = 0.0
    layerwise: float = 0.0

    def __post_init__(self) -> None:
        for name in PARTS:
            weight = getattr(self, name)
            if not (isinstance(weight, int | float) and isfinite(weight) and weight >= 0):
                raise SurgeryError(f"objective {name}: {weight!r} is no weight; give 0 or a positive number")
        if not self.parts():
            raise SurgeryError(f"all objectives have weight 0: give one of {', '.join(PARTS)} a positive one")
        if self.layerwise and len(self.parts()) > 1:
            raise SurgeryError("objective layerwise is a stage of its own: give the other losses to the next")
        _check(self.temperature, self.jsd_beta)

    def parts(self) -> list[str]:
        """Names of the parts that count."""
        return [name for name in PARTS if getattr(self, name)]

    @property
    def needs_teacher(self) -> bool:
        """Whether the teacher's distribution is compared with."""
        return any(getattr(self, name) for name in DISTILLED)


def predicting(labels: LongTensor) -> BoolTensor:
    """Which positions predict something: [B, T - 1], true at t where ``labels`` [B, T] hold a token at t + 1."""
    return labels[:, 1:] != -100


def logit_losses(
    weights: ObjectiveWeights,
    student: States,
    teacher: Teacher | None = None,
    targets: LongTensor | None = None,
    *,
    chunks: int | None = None,
    positions: float | None = None,
    liger: bool = False,
) -> dict[str, Tensor]:
    """All parts of the loss that are made of logits, of weight 1, in one pass over the positions.

    Args:
        weights: which parts, and β and τ.
        student: at the N positions that predict something.
        teacher: at the same, with any hidden size; None if no part needs it. Its gradient is not taken.
        targets: [N] int64, the tokens that come next; None if no part needs them.
        chunks: in how many chunks the positions go; None for what `chunk_count` says of N. Where heads are sharded
            every chunk gathers them, so all processes must be given the same number, whatever their N.
        positions: what the sums are divided by; None for N. With the number in the global batch, divided by how many
            times the optimizer's gradient averages (processes, accumulated batches), every position counts the same
            however they were dealt.
        liger: take liger-kernel's fused losses where they compute the same, see `liger.fits`.

    Returns:
        Scalars by the names of `ObjectiveWeights`, with gradients if they are enabled; 0 where N is 0.

    Raises:
        SurgeryError: the vocabularies differ in size, N does, a kept teacher is asked for a temperature, or
            liger-kernel for its losses where it is not installed.
    """
    names = [name for name in ON_LOGITS if getattr(weights, name)]
    known = {"kl": 0.0, "reverse_kl": 1.0, "jsd": weights.jsd_beta}
    betas = [known[name] for name in names if name in known]
    targets = targets if weights.cross_entropy else None
    if weights.cross_entropy and targets is None:
        raise SurgeryError("cross-entropy needs the tokens that come next")
    if not names:
        return {}
    how = {"chunks": chunks, "positions": positions, "liger": liger}
    means = _mean(betas, student, teacher if betas else None, targets, weights.temperature, **how)
    return dict(zip(names, means.unbind(), strict=True))


def combine(weights: ObjectiveWeights, parts: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and its parts for a log.

    Args:
        weights: those of all parts that count.
        parts: these parts, of weight 1, by name; scalars.

    Returns:
        The weighted sum with gradients; the parts of weight 1 without, still on their device, to be read when it suits.

    Raises:
        SurgeryError: a part that counts is missing.
    """
    missing = [name for name in weights.parts() if name not in parts]
    if missing:
        raise SurgeryError(f"no loss was computed for {', '.join(missing)}: set its weight to 0 or give what it needs")
    total = torch.stack([getattr(weights, name) * parts[name].float() for name in weights.parts()]).sum()
    return total, {name: part.detach() for name, part in parts.items()}


def _mean(
    betas: list[float],
    student: States,
    teacher: Teacher | None,
    targets: LongTensor | None,
    temperature: float,
    *,
    chunks: int | None = None,
    positions: float | None = None,
    liger: bool = False,
) -> Tensor:
    """Means over positions of JSD(β) for each β, and of the cross-entropy if there are targets: one vector."""
    vocabulary, count = student.vocabulary(), len(student.hidden)
    columns = [student.hidden]
    if betas:
        columns += _columns_of(teacher, vocabulary, temperature, student.hidden.device)
    if targets is not None:
        columns.append(targets.to(student.hidden.device))
    if any(len(column) != count for column in columns):
        sizes = ", ".join(str(len(column)) for column in columns)
        raise SurgeryError(f"student, teacher and tokens differ in their number of positions: {sizes}")

    def sums(hidden: Tensor, *rest: Tensor) -> Tensor:
        logits = student._replace(hidden=hidden).logits()
        values = []
        if betas:
            pair = _log_probabilities(logits, teacher, rest, temperature)
            values = [temperature**2 * _divergence(*pair, beta) for beta in betas]
        if targets is not None:
            values.append(token_cross_entropy(logits, rest[-1], reduction="sum"))
        return torch.stack(values)

    def fused_sums(hidden: Tensor, *rest: Tensor) -> Tensor:
        pair = student._replace(hidden=hidden), teacher._replace(hidden=rest[0]) if betas else None
        values = [fused.divergence(*pair, beta, temperature) for beta in betas]
        if targets is not None:
            values.append(fused.cross_entropy(pair[0], rest[-1]))
        return torch.stack(values)

    if liger:
        fused.check()
        liger = fused.fits(student) and (not betas or (isinstance(teacher, States) and fused.fits(teacher)))
    chunks = chunk_count(count, vocabulary) if chunks is None else chunks
    total = summed_over_chunks(fused_sums if liger else sums, columns, chunks, recompute=not liger)
    return total / (max(count, 1) if positions is None else positions)


def _columns_of(teacher: Teacher | None, vocabulary: int, temperature: float, device: torch.device) -> list[Tensor]:
    """What of a teacher goes in chunks, after a look at what cannot be compared."""
    if teacher is None:
        raise SurgeryError("a divergence from the teacher needs the teacher, or its logits that were kept")
    cached = isinstance(teacher, TopK)
    size = teacher.vocabulary if cached else teacher.vocabulary()
    if size != vocabulary:
        raise SurgeryError(
            f"the student has a vocabulary of {vocabulary}, its teacher of {size}: they cannot be compared token by"
            " token; give a teacher with the student's vocabulary"
        )
    if not cached:
        return [teacher.hidden.detach()]
    if temperature != 1:
        raise SurgeryError(f"temperature {temperature} with a teacher's top tokens: they were kept at temperature 1")
    return list(vars(teacher.to(device)).values())[:3]


def _log_probabilities(
    logits: Tensor, teacher: Teacher, columns: tuple[Tensor, ...], temperature: float
) -> tuple[Tensor, Tensor]:
    """Of student and teacher over the same outcomes, whatever is known of the teacher."""
    if isinstance(teacher, TopK):
        return buckets(logits, TopK(*columns[:3], teacher.vocabulary))
    with torch.no_grad():
        wanted = teacher._replace(hidden=columns[0]).logits().to(logits.device)
        wanted = log_softmax(wanted / temperature, dim=-1)
    return log_softmax(logits / temperature, dim=-1), wanted


def _divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """JSD(β) of log-probabilities [N, m], summed over rows; at temperature 1."""
    if beta == 0:
        return (teacher.exp() * (teacher - student)).sum()
    if beta == 1:
        return (student.exp() * (student - teacher)).sum()
    mixture = torch.logaddexp(teacher + log(beta), student + log(1 - beta))
    of_teacher = (teacher.exp() * (teacher - mixture)).sum()
    return beta * of_teacher + (1 - beta) * (student.exp() * (student - mixture)).sum()


def _check(temperature: float, beta: float = 0.5) -> None:
    if not (isinstance(temperature, int | float) and isfinite(temperature) and temperature > 0):
        raise SurgeryError(f"temperature {temperature!r}: a positive number is needed")
    if not (isinstance(beta, int | float) and 0 <= beta <= 1):
        raise SurgeryError(f"jsd_beta {beta!r}: a number from 0 to 1 is needed")
