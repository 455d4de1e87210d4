"""Losses between the layer outputs of student and teacher: in full forward passes, or layer by layer.

Matching the outputs of layers makes the student's residual stream follow the teacher's. In the layer-wise stage every
attention gets its teacher's input instead, as in CSKV (Wang et al., arXiv:2409.10593), so that layers are independent
and the gradient ends inside each. The teacher runs first; its recording takes B·T·D elements per layer and kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import BoolTensor, Tensor, nn

from surgery.common.errors import SurgeryError
from surgery.training.recording import Recording, attention_of, decoder_of, first, recorded, same_layers


def layer_errors(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    valid: BoolTensor | None = None,
    positions: float | None = None,
) -> Tensor:
    """Compute the relative squared error of each layer: [L] in fp32 (fp64 for fp64 inputs).

    Errors of a sequence are divided by the teacher's mean square on that sequence, so that the result does not depend
    on how sequences are dealt to processes and batches.

    Args:
        student: L tensors [B, T, D], with gradients if they are enabled; the teacher's have none.
        valid: mask [B, T] of the positions to compare; None for all.
        positions: divisor of the sums over positions; None for the number of valid ones.

    Raises SurgeryError: numbers of layers or shapes differ.
    """
    if len(student) != len(teacher):
        raise SurgeryError(
            f"numbers of layers differ: student {len(student)}, teacher {len(teacher)}; they must be equal"
        )
    sums = [_summed_error(*pair, valid) for pair in zip(student, teacher, strict=True)]
    if positions is None:
        positions = max(1, int(valid.sum()) if valid is not None else student[0].shape[:2].numel())
    # Layers of one model may lie on several devices.
    return torch.stack([error.to(sums[0].device) for error in sums]) / positions


def matching_loss(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    valid: BoolTensor | None = None,
    positions: float | None = None,
) -> Tensor:
    """Compute the mean of `layer_errors` over layers, a scalar: the objective's losses `hidden` and `layerwise`."""
    return layer_errors(student, teacher, valid, positions).mean()


@contextmanager
def on_teacher_inputs(student: nn.Module, teacher: Recording) -> Iterator[Recording]:
    """Run each attention of the student on its teacher's input in a ``with`` block; yield a recording of its outputs.

    All other arguments of an attention are the student's own, so classes may differ. The output is recorded with
    gradients, and replaced in the residual stream by the teacher's, so that gradients end in the attention. Only
    attention parameters get gradients: set DDP's `find_unused_parameters` if others are trainable. Under FSDP keep
    weights gathered after the forward pass. `teacher` is a recording of `attention` and `inputs` for the same tokens.

    Raises SurgeryError: the numbers of layers differ; or, in the forward pass, hidden sizes or tokens differ or
    gradient checkpointing is on.
    """
    decoder = decoder_of(student)
    inputs, outputs = teacher.inputs, teacher.attention
    same_layers(student, outputs)

    def give_input(layer: int) -> Callable[..., tuple[tuple, dict[str, Any]]]:
        def give(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            # Checkpointing reruns layers in the backward pass, after the hooks are removed.
            if decoder.training and getattr(decoder.layers[layer], "gradient_checkpointing", False):
                raise SurgeryError(
                    "objective layerwise does not support gradient checkpointing: set gradient_checkpointing to false"
                )
            own = args[0] if args else kwargs["hidden_states"]
            teacher_states = _same_tokens(inputs[layer], record.seen(layer), own)
            return (
                ((teacher_states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": teacher_states})
            )

        return give

    def give_output(layer: int) -> Callable[..., Any]:
        def give(module: nn.Module, args: tuple, output: Any) -> Any:
            own = first(output)
            teacher_states = _same_tokens(outputs[layer], record.seen(layer) - own.shape[1], own)
            return (teacher_states, *output[1:]) if isinstance(output, tuple | list) else teacher_states

        return give

    with recorded(student, attention=True) as record, ExitStack() as stack:
        for index, layer in enumerate(decoder.layers):
            # Registered after the recording's hooks, so that these see the student's own output.
            hook = attention_of(layer).register_forward_pre_hook(give_input(index), with_kwargs=True)
            stack.callback(hook.remove)
            stack.callback(attention_of(layer).register_forward_hook(give_output(index)).remove)
        yield record


def _same_tokens(teacher: Tensor, start: int, own: Tensor) -> Tensor:
    """Return the teacher's states at the tokens of ``own``, the student's, in its dtype and on its device."""
    states = teacher[:, start : start + own.shape[1]]
    if states.shape != own.shape:
        raise SurgeryError(
            f"hidden states {list(own.shape)} of the student, {list(states.shape)} of its teacher: layers can be "
            "matched for the same tokens and hidden size only"
        )
    return states.detach().to(own)


def _summed_error(student: Tensor, teacher: Tensor, valid: BoolTensor | None) -> Tensor:
    """Sum one layer's relative squared errors over valid positions; see `layer_errors`."""
    if student.shape != teacher.shape:
        raise SurgeryError(
            f"outputs {list(student.shape)} of a student's layer, {list(teacher.shape)} of its teacher's: they cannot"
            " be matched"
        )
    wide = torch.promote_types(student.dtype, torch.float32)
    teacher = teacher.detach().to(student.device, wide)
    errors = (student.to(wide) - teacher).square().mean(-1)
    squares = teacher.square().mean(-1)
    if valid is None:
        counted = torch.full((), squares.shape[1], device=squares.device)
    else:
        valid = valid.to(squares.device)
        errors, squares = errors.where(valid, 0), squares.where(valid, 0)
        counted = valid.sum(1)
    means = squares.sum(1) / counted.clamp(min=1)
    return (errors.sum(1) / means.clamp(min=torch.finfo(wide).tiny)).sum()
