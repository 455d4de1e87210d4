"""What one batch keeps for its backward pass, followed on tensors that have shapes and no numbers.

How many numbers autograd keeps of a layer depends on what trains (a frozen linear module does not keep its input) and
on how the layer is written, so it is not counted by formulas such as those of Korthikanti et al. (arXiv:2205.05198) but
seen: the model runs on fake tensors, and hooks note the bytes of every storage that is saved. Attention counts as fused
kernels have it, which keep queries, keys, values, outputs, one fp32 number a query and head, and the mask in the
queries' dtype: it is caught on its way to whatever kernel a CPU would take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from surgery.training.matching import matching_loss, on_teacher_inputs
from surgery.training.objectives import ObjectiveWeights
from surgery.training.recording import decoder_of, recorded


@dataclass
class Kept:
    """What following a batch showed.

    Attributes:
        outside: bytes kept outside of decoder layers, and of what is recorded to match layers.
        layers: bytes kept by each decoder layer of the student.
        student_attention, teacher_attention: FLOPs of the products of queries with keys and of weights with values,
            in one forward pass over the batch; every position counts, also those that masks leave out.
    """

    outside: int = 0
    layers: list[int] = field(default_factory=list)
    student_attention: int = 0
    teacher_attention: int = 0


def follow(
    student: nn.Module,
    teacher: nn.Module | None,
    weights: ObjectiveWeights,
    tokens: Tensor,
    positions: Tensor,
    computed: torch.dtype,
) -> Kept:
    """Runs the bodies of student and teacher on one batch as `distillation.Distillation` does; heads are left out.

    To be called in a ``FakeTensorMode``, in which the arguments were made.

    Args:
        student: trains what has `requires_grad`, without gradient checkpointing.
        tokens: [B, T].
        positions: [B, T], of packed documents.
        computed: what autocast computes in.
    """
    kept = Kept()
    call = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    matches = {"hidden": bool(weights.hidden), "attention": bool(weights.attention)}
    if weights.layerwise:
        matches = {"attention": True, "inputs": True}
    valid = torch.ones_like(tokens, dtype=torch.bool)
    known = None
    with torch.autocast("cpu", dtype=computed, enabled=computed != torch.float32):
        if teacher is not None:
            with torch.no_grad(), recorded(teacher, **matches) as known, _FusedAttention(computed) as fused:
                teacher.base_model(**call)
            kept.teacher_attention = fused.flops
        with _saved_by(student, kept) as saved, _FusedAttention(computed) as fused:
            recorder = on_teacher_inputs(student, known) if weights.layerwise else recorded(student, **matches)
            with recorder as own:
                student.base_model(**call)
            for name in (name for name, asked in matches.items() if asked and name != "inputs"):
                matching_loss(getattr(own, name), getattr(known, name), valid, 1.0)
                saved.add(*getattr(known, name))
            if weights.layerwise:
                saved.add(*known.inputs)
    kept.student_attention = fused.flops
    kept.outside = saved.total - sum(kept.layers)
    return kept


class _Saved:
    """Storages that are kept, each once."""

    def __init__(self, model: nn.Module) -> None:
        self._free = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._storages: dict[int, Any] = {}  # held, so that no other gets the same address
        self.total = 0

    def add(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._free and storage._cdata not in self._storages:
                self._storages[storage._cdata] = storage
                self.total += storage.nbytes()


@contextmanager
def _saved_by(model: nn.Module, kept: Kept) -> Iterator[_Saved]:
    """Notes what autograd saves for the length of a ``with`` block, and in `kept.layers` what each layer does."""
    saved = _Saved(model)

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor)
        return tensor

    layers = decoder_of(model).layers
    kept.layers = [0] * len(layers)

    def counter(index: int, sign: int):
        def count(*_: Any) -> None:
            kept.layers[index] += sign * saved.total

        return count

    hooks = []
    for index, layer in enumerate(layers):
        hooks += [layer.register_forward_pre_hook(counter(index, -1)), layer.register_forward_hook(counter(index, 1))]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield saved
    finally:
        for hook in hooks:
            hook.remove()


class _FusedAttention(TorchFunctionMode):
    """Has `scaled_dot_product_attention` keep what fused kernels do, and counts its FLOPs."""

    def __init__(self, computed: torch.dtype) -> None:
        super().__init__()
        self._computed, self.flops = computed, 0

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is not scaled_dot_product_attention:
            return function(*args, **kwargs)
        named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
        query, key, value = (named[name].to(self._computed) for name in ("query", "key", "value"))
        self.flops += 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return _KeepsItsArguments.apply(query, key, value, named.get("attn_mask"))


class _KeepsItsArguments(torch.autograd.Function):
    """An attention of the right shape."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # As kernels lay it out, so that joining the heads copies nothing.
        batch, heads, tokens, _ = query.shape
        output = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        context.save_for_backward(query, key, value, output, sums, None if mask is None else mask.to(query.dtype))
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = context.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
