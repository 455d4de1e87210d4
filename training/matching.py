"""Losses between what the layers of a student and of its teacher give: in one run of both, or each layer alone.

Matching layers' outputs makes the student's residual stream follow the teacher's; matching attentions' outputs asks it
of the converted part only. In a run of its own the student's errors reach later layers, which learn to undo them. In
the layer-wise stage every attention is given its teacher's input instead, as in CSKV (Wang et al., arXiv:2409.10593),
so that no layer depends on another and the gradient ends inside of it.

A pass of the teacher comes first, under `torch.no_grad`, and costs B·T·D numbers a layer and kind while the student's
runs.
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
    """The squared error of each layer, relative to the teacher's mean square: [L] in fp32 (fp64 for fp64 inputs).

    Every sequence is measured by its own teacher's mean square, so that the result is the same however sequences are
    dealt to processes and batches; then all valid positions count the same.

    Args:
        student: L tensors [B, T, D], with gradients if they are enabled.
        teacher: as many of the same shape; no gradient.
        valid: [B, T], the positions that count; all if None. A text's first token, whose hidden states are huge in many
            models, may be worth leaving out.
        positions: what the sums over positions are divided by; None for the number of valid ones. See
            `objectives.logit_losses`.

    Raises:
        SurgeryError: numbers of layers or shapes differ.
    """
    if len(student) != len(teacher):
        raise SurgeryError(f"the student has {len(student)} layers, its teacher {len(teacher)}: they cannot be matched")
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
    """The mean over layers of `layer_errors`, a scalar: the parts `hidden` and `attention` of the objective."""
    return layer_errors(student, teacher, valid, positions).mean()


@contextmanager
def on_teacher_inputs(student: nn.Module, teacher: Recording) -> Iterator[Recording]:
    """Run each attention of the student on its teacher's input, for the length of a ``with`` block.

    Everything else that an attention is called with (masks, positions, rotary embeddings, what layers share) is of the
    student's own making, so that teacher and student may be of different classes. Its output is recorded, with
    gradients; the student's residual stream goes on with the teacher's output instead. So gradients end in the
    attention (or the attentions, where some share their caches), and MLPs run without any unless they train.

    The block holds forward passes; backward passes may follow it. Other parameters than the attentions' get no
    gradient: DDP must be told (`find_unused_parameters`) if they would train. FSDP that reshards after the forward
    pass gathers a layer's weights again when its output's gradient arrives, and here none does: keep them gathered.

    Args:
        student: with as many layers and the same hidden size; not under gradient checkpointing, which would save
            nothing here.
        teacher: a recording of `attention` and `inputs` of the same tokens.

    Yields:
        A recording of the student with `attention`, to be compared with the teacher's by `layer_errors`.

    Raises:
        SurgeryError: the student has another number of layers, or (while it runs) another hidden size, other tokens or
            gradient checkpointing.
    """
    decoder = decoder_of(student)
    inputs, outputs = teacher.inputs, teacher.attention
    same_layers(student, outputs)

    def give_input(layer: int) -> Callable[..., tuple[tuple, dict[str, Any]]]:
        def give(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            # It would run layers again after the block, where nobody hands them the teacher's inputs.
            if decoder.training and getattr(decoder.layers[layer], "gradient_checkpointing", False):
                raise SurgeryError("the layer-wise stage runs without gradient checkpointing: turn it off")
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
            # After those of the recording, which so sees the student's own output.
            hook = attention_of(layer).register_forward_pre_hook(give_input(index), with_kwargs=True)
            stack.callback(hook.remove)
            stack.callback(attention_of(layer).register_forward_hook(give_output(index)).remove)
        yield record


def _same_tokens(teacher: Tensor, start: int, own: Tensor) -> Tensor:
    """The teacher's states at the tokens of which the student has its ``own``, in its dtype and on its device."""
    states = teacher[:, start : start + own.shape[1]]
    if states.shape != own.shape:
        raise SurgeryError(
            f"hidden states {list(own.shape)} of the student, {list(states.shape)} of its teacher: layers can be "
            "matched for the same tokens and hidden size only"
        )
    return states.detach().to(own)


def _summed_error(student: Tensor, teacher: Tensor, valid: BoolTensor | None) -> Tensor:
    """Sum over valid positions of one layer's squared error over its sequence's mean square."""
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
