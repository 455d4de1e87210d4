"""An operation as PyTorch sees it: schema, fake results and fallback, all from its plain reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.library import CustomOpDef

from surgery.kernels.backend import refusal, tell_once
from surgery.kernels.launch import naming, signature_of
from surgery.kernels.plan import TENSORS, Cache, Growth, Layout, Plan, Results, Run


class Operation:
    """`surgery::<name>`, with the arguments of `reference`, in their order: kernels, or the reference if none can run.

    Calls are planned once (`plan.py`) and launched without PyTorch's dispatch, unless something has to see the
    operator: `torch.compile`, gradients, modes and subclasses of tensors. Decoding has no gradients: a backward pass
    raises PyTorch's error, unless the caller registers one (`mla_prefill`).

    Args:
        reference: the operation in plain PyTorch; annotated, since the schema is read off its signature.
        outputs: gives the results of a call, uninitialized: what tracing sees. A call is a namespace of all arguments.
        unsupported: says why the kernel does not take a call; None if it does.
        check: raises ValueError for arguments of a call that do not belong together.
        kernel: the module whose `launches` are run, `<name>/kernel.py` by default; imported only then: it needs Triton.
        settings: arguments behind those of the reference that only kernels have a use for: optional integers.
        mutates: tensors among the arguments that the operation fills; it has no results then.
        growth: dimensions that grow with a text, as `Layout` takes them.
        free: integers that change at every step; kernels must not specialize on them.

    Attributes:
        registered: the operator of PyTorch.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Results],
        outputs: Callable[[SimpleNamespace], Results],
        unsupported: Callable[[SimpleNamespace], str | None],
        check: Callable[[SimpleNamespace], None],
        *,
        kernel: str | None = None,
        settings: tuple[str, ...] = (),
        mutates: tuple[str, ...] = (),
        growth: Growth = (),
        free: tuple[str, ...] = (),
    ) -> None:
        self._name, self._module = name, kernel or f"surgery.kernels.{name}.kernel"
        self._outputs, self._unsupported, self._check = outputs, unsupported, check
        signature = signature_of(reference, *settings)
        bind, num_tensors = naming(signature), len(signature.parameters) - len(settings)
        self._reference = lambda *values: reference(*values[:num_tensors])
        tensors = {name for name, each in signature.parameters.items() if "Tensor" in str(each.annotation)}
        self._layout = Layout(tuple(signature.parameters), tensors, growth, free)
        self._plans, self._calls = Cache(), Cache()

        def compute(*args: Any, **kwargs: Any) -> Results:
            arguments = bind(args, kwargs)
            return self._run([_plain(arguments[name]) for name in self._layout.names])

        compute.__signature__ = signature
        schema = torch.library.infer_schema(compute, mutates_args=mutates)
        self.registered: CustomOpDef = torch.library.custom_op(
            f"surgery::{name}", compute, mutates_args=mutates, schema=schema
        )

        def traced(*args: Any, **kwargs: Any) -> Results:
            call = SimpleNamespace(**bind(args, kwargs))
            check(call)
            return outputs(call)

        self.registered.register_fake(traced)

    def __call__(self, *values: Any) -> Results:
        """The results of all arguments, in the order of the schema."""
        if not is_watched():
            key = self._layout.exact_key(values, torch.is_grad_enabled())
            if key is not None:
                run, extents = self._calls.get(key) or self._find(key, values)
                return run(values, extents)
        return self.registered(*values)

    def _run(self, values: Sequence[Any]) -> Results:
        key = self._layout.exact_key(values)
        run, extents = self._calls.get(key) or self._find(key, values)
        return run(values, extents)

    def _find(self, exact_key: tuple[Any, ...], values: Sequence[Any]) -> tuple[Run, list[int]]:
        key, extents = self._layout.key(values)
        run = self._plans.get(key)
        if run is None:
            run = self._plans[key] = self._plan(values)
        self._calls[exact_key] = run, extents
        return run, extents

    def _call(self, values: Sequence[Any]) -> SimpleNamespace:
        return SimpleNamespace(**dict(zip(self._layout.names, values, strict=True)))

    def _plan(self, values: Sequence[Any]) -> Run:
        """The plan of calls like this one.

        Raises:
            ValueError: arguments that do not belong together.
        """
        # No tensor twice: a plan tells arguments apart by their identity.
        values = [value.detach() if isinstance(value, Tensor) else value for value in values]
        call = self._call(values)
        self._check(call)
        tensors = [value for value in values if isinstance(value, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            return lambda values, _: self.registered(*values)
        reason = refusal(*tensors) or self._unsupported(call)
        if reason:
            return lambda values, _: (tell_once(self._name, reason), self._reference(*values))[1]
        # Kernels take the numbers of a last dimension side by side.
        if any(side_by_side(tensor) is not tensor for tensor in tensors):
            return lambda values, _: self._run([side_by_side(value) for value in values])
        outputs = self._outputs(call)
        memory = (outputs,) if isinstance(outputs, Tensor) else outputs or ()
        launches = import_module(self._module).launches(*values, **dict(zip(("out", "lse"), memory, strict=False)))
        return Plan(self._layout, values, outputs, launches)


def is_watched() -> bool:
    """Tell whether something but autograd has to see operators: a compiler, a tracer, a mode or a transform."""
    return (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack() > 0
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _is_tracing()
    )


def _plain(value: Any) -> Any:
    """Arguments as plans take them: lists hashable, tensors without the methods of a subclass."""
    if isinstance(value, Tensor):
        return value if type(value) in TENSORS else value.as_subclass(Tensor)
    return tuple(value) if isinstance(value, list) else value


def side_by_side(value: Any) -> Any:
    """A tensor, copied if the numbers of its last dimension lie apart; anything else as it is."""
    if not isinstance(value, Tensor) or value.shape[-1] < 2 or value.stride(-1) == 1:
        return value
    return value.contiguous()


def attention_outputs(query: Tensor, width: int) -> Results:
    """Memory for out [B, T, H, width] in the dtype of query [B, T, H, ·], and for lse [B, T, H] in fp32 at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:3], width), query.new_empty(query.shape[:3], dtype=wide)


def prefill_outputs(call: SimpleNamespace) -> Results:
    """Memory for out [B, T, H, v] and lse [B, H, T] of queries [B, H, T, ·] and values [B, G, S, v]."""
    out, lse = attention_outputs(call.query.transpose(1, 2), call.value.shape[-1])
    return out, lse.new_empty(call.query.shape[:3])
