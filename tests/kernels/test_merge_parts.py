"""Parts over disjoint tokens merged: exactly what one softmax over all of them gives."""

import pytest
import torch

from surgery.kernels.merge_parts import merge_parts

torch.manual_seed(0)


def part(query, key, value):
    logits = query @ key.transpose(-1, -2)
    return logits.softmax(-1) @ value, logits.logsumexp(-1)


@pytest.mark.parametrize("stacked", [False, True])
def test_parts_are_one_softmax(stacked):
    query = torch.randn(2, 3, 4, 8, dtype=torch.float64) * 3
    key, value = (torch.randn(2, 1, 9, width, dtype=torch.float64) for width in (8, 5))
    expected = part(query, key, value)
    cuts = [slice(0, 1), slice(1, 7), slice(7, 9)]
    outs, lses = zip(*(part(query, key[..., cut, :], value[..., cut, :]) for cut in cuts), strict=True)
    result = merge_parts(torch.stack(outs), torch.stack(lses)) if stacked else merge_parts(outs, lses)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_parts_without_tokens():
    out, lse = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3) * 100
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    merged = merge_parts([nothing[0], out], [nothing[1], lse])
    assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    merged = merge_parts([nothing[0]] * 2, [nothing[1]] * 2)
    assert torch.equal(merged[0], nothing[0]) and torch.equal(merged[1], nothing[1])


def test_the_dtypes_of_operators():
    outs, lses = torch.randn(2, 1, 1, 3, 4, dtype=torch.bfloat16), torch.randn(2, 1, 1, 3)
    out, lse = merge_parts(outs, lses)
    exact, _ = merge_parts(outs.double(), lses.double())
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.equal(out, exact.bfloat16())


def test_gradients():
    outs = [torch.randn(1, 2, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(1, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda a, b, c, d: merge_parts([a, b], [c, d]), (*outs, *lses))
    empty = torch.full((1, 2, 2), -torch.inf, dtype=torch.float64, requires_grad=True)
    merged, _ = merge_parts(outs, [empty, empty])
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(merged.sum(), [*outs, empty]))


def test_it_compiles_into_a_graph():
    outs, lses = torch.randn(2, 1, 1, 3, 4), torch.randn(2, 1, 1, 3)
    result = torch.compile(merge_parts, fullgraph=True, backend="aot_eager")
    for one, other in zip(result(list(outs), list(lses)), merge_parts(outs, lses), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [([], [], "0 outs"), ([(2, 3)], [(2,), (2,)], "1 outs and 2"), ([(2, 3), (1, 3)], [(2,), (1,)], "other rows")],
)
def test_what_does_not_fit_is_refused(outs, lses, message):
    with pytest.raises(ValueError, match=message):
        merge_parts([torch.zeros(shape) for shape in outs], [torch.zeros(shape) for shape in lses])
