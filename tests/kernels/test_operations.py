"""Operators of PyTorch: registration, gradients, graphs and refusals of every operation."""

from __future__ import annotations

import pytest
import torch
from kernel_examples import collect
from torch import Tensor

from surgery.kernels import plan

CALLS = dict(collect("EXAMPLES"))
every = pytest.mark.parametrize("example", CALLS.values(), ids=CALLS)


@every
def test_pytorch_knows_the_operator(example, device):
    arguments = example.arguments(torch.float32, device) | example.settings
    torch.library.opcheck(example.operator, (), arguments, test_utils=("test_schema", "test_faketensor"))


@every
def test_decoding_says_that_it_has_no_gradients(example, device):
    arguments = example.arguments(torch.float64, device, gradients=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        example.operator(**arguments)[0].sum().backward()


@every
def test_it_compiles_into_one_graph(example, device):
    settings = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in (example.given | example.of_function | example.settings).items()
    }

    def step(query, rest):
        out, *_, lse = example.function(query=query * 2, **rest)
        return out + 1, lse

    query = settings.pop("query")
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for result, expected in zip(compiled(query, settings), step(query, settings), strict=True):
        assert torch.equal(result, expected)


REFUSED = [(name, *refused) for name, example in CALLS.items() for refused in example.refused]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=[f"{name}: {what}" for name, _, what in REFUSED])
def test_what_does_not_belong_together_is_refused(name, change, message):
    """Refuse at first, and after a call that was right, whose plan is known."""
    example = CALLS[name]
    right = example.given | example.of_function
    plan.forget_plans()
    with pytest.raises(ValueError, match=message):
        example.function(**right | change)
    example.function(**right)
    with pytest.raises(ValueError, match=message):
        example.function(**right | change)
