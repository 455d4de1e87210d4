"""An operation as PyTorch sees it: schema, fake results, gradients and fallback, all from its plain reference."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from surgery.kernels.backend import refusal, tell_once
from surgery.kernels.launch import naming, signature_of

Results = tuple[Tensor, ...]


def operation(
    name: str,
    reference: Callable[..., Results],
    outputs: Callable[..., Results],
    unsupported: Callable[..., str | None],
    *,
    kernel: str | None = None,
    settings: tuple[str, ...] = (),
    differentiable: bool = True,
) -> CustomOpDef:
    """Registers `surgery::<name>`, with the arguments of `reference`, in their order.

    It runs kernels, or the reference where none can run, and says so once.

    Args:
        reference: the operation in plain PyTorch; annotated, since the schema is read off its signature.
        outputs: the results, uninitialised, of the arguments by name; what tracing sees of the operation.
        unsupported: of the arguments by name, why the kernel does not take them; None if it does.
        kernel: the module whose `launches` are run, `<name>/kernel.py` by default; imported only then: it needs Triton.
        settings: arguments behind those of the reference that only kernels have a use for: optional integers.
        differentiable: gradients are those of the reference; else the caller registers others, or there are none.
    """
    module = kernel or f"surgery.kernels.{name}.kernel"
    signature = signature_of(reference, *settings)
    named = naming(signature)

    def plain(*args: Any, **kwargs: Any) -> Results:
        given = named(args, kwargs)
        return reference(**{name: value for name, value in given.items() if name not in settings})

    def compute(*args: Any, **kwargs: Any) -> Results:
        given = named(args, kwargs)
        reason = refusal(*(value for value in given.values() if isinstance(value, Tensor))) or unsupported(**given)
        if reason:
            tell_once(name, reason)
            return plain(**given)
        out, lse = outputs(**given)
        # Kernels take the numbers of a last dimension side by side.
        given = {name: side_by_side(value) for name, value in given.items()}
        for launch in import_module(module).launches(**given, out=out, lse=lse):
            launch.run()
        return out, lse

    compute.__signature__ = signature
    schema = torch.library.infer_schema(compute, mutates_args=())
    registered = torch.library.custom_op(f"surgery::{name}", compute, mutates_args=(), schema=schema)
    registered.register_fake(lambda *args, **kwargs: outputs(**named(args, kwargs)))
    if differentiable:
        differentiate_by(registered, plain)
    return registered


def side_by_side(value: Any) -> Any:
    """A tensor, copied if the numbers of its last dimension lie apart; anything else as it is."""
    if not isinstance(value, Tensor) or value.shape[-1] < 2 or value.stride(-1) == 1:
        return value
    return value.contiguous()


def attention_outputs(query: Tensor, width: int) -> Results:
    """Memory for out [B, T, H, width] in the dtype of query [B, T, H, ·], and for lse [B, T, H] in fp32 at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:3], width), query.new_empty(query.shape[:3], dtype=wide)


def prefill_outputs(query: Tensor, value: Tensor, **_: object) -> Results:
    """Memory for out [B, T, H, v] and lse [B, H, T] of queries [B, H, T, ·] and values [B, G, S, v]."""
    out, lse = attention_outputs(query.transpose(1, 2), value.shape[-1])
    return out, lse.new_empty(query.shape[:3])


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
