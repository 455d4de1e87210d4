"""Gradients of an operator whose kernel has none of its own: those of its plain reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef


def differentiate_by(operator: CustomOpDef, reference: Callable[..., tuple[Tensor, ...]]) -> None:
    """Registers as backward of `operator` the one of `reference`, which takes the same positional arguments.

    Decoding seldom needs gradients; where it does, the reference is computed again, in its own memory.
    """

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
        ctx.plain = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]

    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if tensor else value for tensor, value in zip(ctx.is_tensor, ctx.plain, strict=True)]
        wanted = [place for place, needed in enumerate(ctx.needs_input_grad) if needed]
        with torch.enable_grad():
            for place in wanted:
                inputs[place] = inputs[place].detach().requires_grad_()
            outputs = reference(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (out, grad) for out, grad in zip(outputs, gradients, strict=True) if grad is not None and out.requires_grad
        ]
        found = torch.autograd.grad(
            [out for out, _ in pairs],
            [inputs[place] for place in wanted],
            [grad.to(out.dtype) for out, grad in pairs],
            allow_unused=True,
        )
        by_place = dict(zip(wanted, found, strict=True))
        return tuple(by_place.get(place) for place in range(len(inputs)))

    operator.register_autograd(backward, setup_context=setup_context)
