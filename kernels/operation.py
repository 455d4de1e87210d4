"""An operation as PyTorch sees it: schema, fake results, gradients and fallback, all from its plain reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from surgery.kernels.backend import refusal
from surgery.kernels.launch import Launch
from surgery.kernels.reference_gradient import differentiate_by

Results = tuple[Tensor, ...]


def operation(
    name: str,
    reference: Callable[..., Results],
    outputs: Callable[..., Results],
    *,
    settings: tuple[str, ...] = (),
    differentiable: bool = True,
) -> Callable[[Callable[..., Results]], CustomOpDef]:
    """Registers what it decorates as `surgery::<name>`, with the arguments of `reference`, in their order.

    What is decorated is given a `Call` and then all arguments by name, and runs kernels or `call.reference()`.

    Args:
        reference: the operation in plain PyTorch; annotated, since the schema is read off its signature.
        outputs: the results, uninitialised, of the arguments by name; what tracing sees of the operation.
        settings: arguments behind those of the reference that only kernels have a use for: optional integers.
        differentiable: gradients are those of the reference; else the caller registers others, or there are none.
    """
    signature = inspect.signature(reference, eval_str=True)
    optional = inspect.Parameter("_", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=int | None)
    parameters = [*signature.parameters.values(), *(optional.replace(name=setting) for setting in settings)]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}

    def named(args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        # PyTorch leaves out trailing arguments that are defaults.
        return defaults | dict(zip((each.name for each in parameters), args, strict=False)) | kwargs

    def plain(*args: Any, **kwargs: Any) -> Results:
        given = named(args, kwargs)
        return reference(**{name: value for name, value in given.items() if name not in settings})

    def register(kernels: Callable[..., Results]) -> CustomOpDef:
        def compute(*args: Any, **kwargs: Any) -> Results:
            given = named(args, kwargs)
            return kernels(Call(given, plain, outputs), **given)

        compute.__signature__ = signature.replace(parameters=parameters)
        schema = torch.library.infer_schema(compute, mutates_args=())
        registered = torch.library.custom_op(f"surgery::{name}", compute, mutates_args=(), schema=schema)
        registered.register_fake(lambda *args, **kwargs: outputs(**named(args, kwargs)))
        if differentiable:
            differentiate_by(registered, plain)
        return registered

    return register


class Call:
    """One call of an operation, its arguments by name."""

    def __init__(
        self, arguments: dict[str, Any], reference: Callable[..., Results], outputs: Callable[..., Results]
    ) -> None:
        self.arguments = arguments
        self._reference, self._outputs = reference, outputs

    def refusal(self) -> str | None:
        """Why no kernel at all can run on these tensors; None if one can."""
        return refusal(*(value for value in self.arguments.values() if isinstance(value, Tensor)))

    def reference(self) -> Results:
        """The results in plain PyTorch."""
        return self._reference(**self.arguments)

    def run(self, launches: Callable[..., list[Launch]]) -> Results:
        """The results of the launches that these arguments and memory for `out` and `lse` are made into.

        Tensors are handed over with the numbers of their last dimension side by side, copied where they are not.
        """
        out, lse = self._outputs(**self.arguments)
        for launch in launches(**{name: side_by_side(each) for name, each in self.arguments.items()}, out=out, lse=lse):
            launch.run()
        return out, lse


def side_by_side(value: Any) -> Any:
    """A tensor, copied if the numbers of its last dimension lie apart; anything else as it is."""
    if not isinstance(value, Tensor) or value.shape[-1] < 2 or value.stride(-1) == 1:
        return value
    return value.contiguous()


def attention_outputs(query: Tensor, width: int) -> Results:
    """Memory for out [B, T, H, width] in the dtype of query [B, T, H, ·], and for lse [B, T, H] in fp32 at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:3], width), query.new_empty(query.shape[:3], dtype=wide)
