"""Losses on logits in chunks, against the plain formulas on whole logits."""

import math

import divergences
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy as whole_cross_entropy
from torch.nn.functional import softmax

from surgery.common.errors import SurgeryError
from surgery.training.chunks import States, chunk_count
from surgery.training.objectives import combine, logit_losses
from surgery.training.settings import ObjectiveWeights

torch.set_num_threads(1)
N, VOCAB, WIDTH, TEACHER_WIDTH = 23, 41, 6, 9
ALL = ObjectiveWeights(kl=1, cross_entropy=1)


def pair(dtype=torch.float64, bias: bool = True) -> tuple[States, States, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = []
    for width in (WIDTH, TEACHER_WIDTH):
        head = nn.Linear(width, VOCAB, bias=bias)
        hidden = torch.randn(N, width, generator=generator)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        states.append(States(hidden.to(dtype).requires_grad_(), head.to(dtype)))
    return *states, torch.randint(0, VOCAB, (N,), generator=generator)


def plain(student: States, teacher: States, targets: torch.Tensor) -> dict:
    """The formulas as they are written, with probabilities."""
    logits = student.head(student.hidden)
    wide = torch.promote_types(logits.dtype, torch.float32)
    q = softmax(logits.to(wide), -1)
    p = softmax(teacher.head(teacher.hidden).detach().to(wide), -1)
    return {"kl": (p * (p / q).log()).sum(-1).mean(), "cross_entropy": whole_cross_entropy(logits.to(wide), targets)}


def gradients(loss: torch.Tensor, states: States) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [states.hidden, *states.head.parameters()], retain_graph=True))


@pytest.mark.parametrize("chunks", [None, 1, 4, 23, 40])
@pytest.mark.parametrize("name", ["kl", "cross_entropy"])
def test_equals_whole_logits(name, chunks):
    student, teacher, targets = pair()
    expected = plain(student, teacher, targets)[name]
    actual = logit_losses(ALL, student, teacher, targets, chunks=chunks)[name]
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(gradients(actual, student), gradients(expected, student), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_in_fp32(dtype):
    student, teacher, targets = pair(dtype)
    expected = plain(student, teacher, targets)
    actual = logit_losses(ALL, student, teacher, targets, chunks=3)
    for name, loss in actual.items():
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected[name], atol=1e-5, rtol=1e-5)
        grads = zip(gradients(loss, student), gradients(expected[name], student), strict=True)
        for grad, target in grads:
            assert grad.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(grad, target, atol=tolerance, rtol=tolerance)


def test_the_teacher_gets_no_gradient():
    student, teacher, targets = pair()
    combine(ALL, logit_losses(ALL, student, teacher, targets, chunks=3))[0].backward()
    assert teacher.hidden.grad is None and teacher.head.weight.grad is None
    assert student.hidden.grad is not None and student.head.weight.grad is not None


def test_frozen_heads():
    student, teacher, _ = pair(bias=False)
    expected = divergences.forward_kl(student, teacher)
    student.head.requires_grad_(False)
    (target,) = torch.autograd.grad(expected, student.hidden)
    loss = divergences.forward_kl(student, teacher, chunks=4)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, student.hidden)[0], target)


def test_logits_of_all_positions_never_exist_at_once():
    student, teacher, targets = pair()
    calls = []
    student.head.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    teacher.head.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    loss = combine(ALL, logit_losses(ALL, student, teacher, targets, chunks=5))[0]
    assert max(calls) == 5 and len(calls) == 2 * 5
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()) or tensor, lambda x: x):
        loss = combine(ALL, logit_losses(ALL, student, teacher, targets, chunks=5))[0]
    assert max(sizes) < 5 * VOCAB
    loss.backward()
    assert max(calls) == 5


def test_positions_dealt_out_sum_to_the_whole():
    student, teacher, targets = pair()
    whole = logit_losses(ALL, student, teacher, targets)
    # Three processes with 4, 19 and no positions; gradients are averaged over them.
    shares = []
    for rows in (slice(0, 4), slice(4, N), slice(N, N)):
        parts = [States(states.hidden[rows], states.head) for states in (student, teacher)]
        shares.append(logit_losses(ALL, *parts, targets[rows], chunks=2, positions=N / 3))
    for name, loss in whole.items():
        torch.testing.assert_close(sum(share[name] for share in shares) / 3, loss)
    grads = torch.autograd.grad(shares[2]["kl"], student.head.weight)
    assert not grads[0].any()


def test_no_position_is_no_loss():
    student, teacher, targets = pair()
    parts = [States(states.hidden[:0], states.head) for states in (student, teacher)]
    total, _ = combine(ALL, logit_losses(ALL, *parts, targets[:0]))
    total.backward()
    assert total == 0 and not student.hidden.grad.any()


def test_chunks():
    assert chunk_count(8192, 128_256, 256 * 2**20) == 16
    assert chunk_count(100, 10**9, 4) == 100
    assert chunk_count(0, 10) == 1


def test_parts_that_are_asked_for_are_made_and_weighed():
    weights = ObjectiveWeights(kl=2.0, hidden=0.5)
    parts = {"kl": torch.tensor(3.0, requires_grad=True), "hidden": torch.tensor(4.0)}
    total, logged = combine(weights, parts)
    assert total == 8 and total.requires_grad
    assert logged == {"kl": 3, "hidden": 4} and not logged["kl"].requires_grad
    student, teacher, targets = pair()
    assert list(logit_losses(ObjectiveWeights(), student, teacher, targets)) == ["kl"]
    assert list(logit_losses(ObjectiveWeights(kl=0, cross_entropy=1), student, targets=targets)) == ["cross_entropy"]
    assert logit_losses(ObjectiveWeights(kl=0, hidden=1), student) == {}


@pytest.mark.parametrize(
    "values, message",
    [
        ({"kl": -1}, "kl: weight must be a finite number >= 0, not -1.0"),
        ({"hidden": math.nan}, "hidden: weight must be a finite number >= 0, not nan"),
        ({"layerwise": "much"}, "layerwise must be a number, not 'much'"),
        ({"kl": 0}, "all objective weights are 0"),
        ({"kll": 1}, "did you mean kl"),
    ],
)
def test_bad_weights(values, message):
    with pytest.raises(SurgeryError, match=message):
        ObjectiveWeights.from_mapping(values, "heal.yaml")
