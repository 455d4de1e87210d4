"""Each loss on logits alone, as the objective with no other part gives it."""

from torch import LongTensor, Tensor

from surgery.training.chunks import States
from surgery.training.objectives import Teacher, logit_losses
from surgery.training.settings import ObjectiveWeights


def forward_kl(student: States, teacher: Teacher, **how) -> Tensor:
    return logit_losses(ObjectiveWeights(kl=1.0), student, teacher, **how)["kl"]


def cross_entropy(student: States, targets: LongTensor, **how) -> Tensor:
    return logit_losses(ObjectiveWeights(kl=0.0, cross_entropy=1.0), student, targets=targets, **how)["cross_entropy"]
