"""Registration of an operation with PyTorch: schema, fake implementation and fallback from its reference."""

from __future__ import annotations

import inspect
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

from surgery.kernels import cpu
from surgery.kernels.backend import DTYPES, refusal, tell_once
from surgery.kernels.launch import naming
from surgery.kernels.plan import TENSORS, Cache, Growth, Layout, Plan, Results, Run


class Operation:
    """Operator `surgery::<name>` with the signature of its reference: runs Triton kernels, or else the reference.

    On a CPU it runs C++ once that is loaded (`cpu.py`). Calls are planned once (`plan.py`) and launched without
    PyTorch's dispatcher, unless the operator must stay visible: to `torch.compile`, autograd, dispatch modes or tensor
    subclasses. Operators have no gradient: a backward pass raises PyTorch's error.

    Args:
        reference: PyTorch implementation; the schema is inferred from its annotated signature.
        outputs: allocates uninitialized results of a call, also for tracing. A call is a namespace of all arguments.
        unsupported: returns the reason why the kernel does not support a call, or None.
        check: raises ValueError for inconsistent arguments.
        kernel: module with `launches`, by default `<name>/kernel.py`; imported lazily, since it needs Triton.
        mutates: tensor arguments that the operation writes to; the operation then returns nothing.
        growth: dimensions that grow with the sequence, as in `Layout`.

    Attributes:
        registered: the registered PyTorch operator.
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
        mutates: tuple[str, ...] = (),
        growth: Growth = (),
    ) -> None:
        self._name, self._module = name, kernel or f"surgery.kernels.{name}.kernel"
        self._outputs, self._unsupported, self._check = outputs, unsupported, check
        self._reference = reference
        signature = inspect.signature(reference, eval_str=True)
        bind = naming(signature)
        tensors = {name for name, each in signature.parameters.items() if "Tensor" in str(each.annotation)}
        self._layout = Layout(tuple(signature.parameters), tensors, growth)
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
        """Run the operation; all arguments are positional, in the order of the schema."""
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
        """Return the plan for calls with this key.

        Raises:
            ValueError: inconsistent arguments.
        """
        # A plan identifies tensors by `id`, so one that is passed twice becomes two objects.
        values = [value.detach() if isinstance(value, Tensor) else value for value in values]
        call = self._call(values)
        self._check(call)
        tensors = [value for value in values if isinstance(value, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            return lambda values, _: self.registered(*values)
        if cpu.runs(self._name, *tensors) and values[0].dtype in DTYPES:
            kernel = getattr(torch.ops.surgery_cpu, self._name)
            return lambda values, _: kernel(*values)
        reason = refusal(*tensors) or self._unsupported(call)
        if reason:
            return lambda values, _: (tell_once(self._name, reason), self._reference(*values))[1]
        # Kernels need a contiguous last dimension.
        if any(with_contiguous_rows(tensor) is not tensor for tensor in tensors):
            return lambda values, _: self._run([with_contiguous_rows(value) for value in values])
        outputs = self._outputs(call)
        memory = (outputs,) if isinstance(outputs, Tensor) else outputs or ()
        launches = import_module(self._module).launches(*values, **dict(zip(("out", "lse"), memory, strict=False)))
        return Plan(self._layout, values, outputs, launches)


def is_watched() -> bool:
    """Return whether a compiler, a tracer, a dispatch mode or a functorch transform has to see operators."""
    return (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack() > 0
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _is_tracing()
    )


def _plain(value: Any) -> Any:
    """Convert an argument for a plan: a list to a hashable tuple, a tensor subclass to a plain tensor."""
    if isinstance(value, Tensor):
        return value if type(value) in TENSORS else value.as_subclass(Tensor)
    return tuple(value) if isinstance(value, list) else value


def with_contiguous_rows(value: Any) -> Any:
    """Make the last dimension of a tensor contiguous; return any other value unchanged."""
    if not isinstance(value, Tensor) or value.shape[-1] < 2 or value.stride(-1) == 1:
        return value
    return value.contiguous()


def attention_outputs(query: Tensor, width: int) -> Results:
    """Allocate out [B, T, H, width] in the dtype of query [B, T, H, ·], and lse [B, T, H] in at least fp32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:3], width), query.new_empty(query.shape[:3], dtype=wide)
