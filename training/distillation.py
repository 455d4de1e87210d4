"""Distillation module: student and teacher, whose forward pass returns losses. accelerate wraps it, the loop trains it.

Everything that touches the student's weights happens in one `forward`, as DDP and FSDP require.

Matching the outputs of layers makes the student's residual stream follow the teacher's. In the layer-wise stage every
attention gets its teacher's input instead, as in CSKV (Wang et al., arXiv:2409.10593), so that layers are independent
and the gradient ends inside each. The teacher runs first; its recording takes B·T·D elements per layer and kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import BoolTensor, LongTensor, Tensor, nn
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.logits import LogitReader, evaluation_mode
from surgery.training.chunks import States, chunk_count
from surgery.training.data import Batch
from surgery.training.objectives import combine, logit_losses
from surgery.training.recording import Recording, attention_of, decoder_of, first, recorded
from surgery.training.settings import ObjectiveWeights
from surgery.training.top_k import TopK


@dataclass(frozen=True)
class Body:
    """Causal LM split into its body, which computes hidden states, and its LM head.

    `splits` says whether the logits are a linear head of the body's hidden states. Otherwise (a softcap after the head)
    the logits of all positions take the place of the hidden states.
    """

    model: PreTrainedModel
    splits: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> Body:
        """Split a model; a forward pass of 8 tokens determines `splits`."""
        device = next(model.parameters()).device
        tokens = torch.arange(8, device=device)[None] % model.get_input_embeddings().weight.shape[0]
        with torch.no_grad(), evaluation_mode(model):
            return cls(model, LogitReader(model, tokens).splits)

    def states(self, tokens: LongTensor, position_ids: LongTensor | None) -> Tensor:
        """Compute final hidden states [B, T, D], or logits [B, T, V] if the model does not split."""
        call = {"input_ids": tokens, "use_cache": False}
        if position_ids is not None:
            call["position_ids"] = position_ids
        return self.model.base_model(**call).last_hidden_state if self.splits else self.model(**call).logits

    def head(self) -> nn.Module:
        """Return the module that maps `states` to logits."""
        return self.model.get_output_embeddings() if self.splits else nn.Identity()


class Distillation(nn.Module):
    """Losses of a student against its teacher on one batch.

    Only the student is a submodule: the teacher is neither trained, saved nor sharded with it.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        weights: ObjectiveWeights,
        teacher: PreTrainedModel | None = None,
        *,
        document_masks: bool = False,
    ) -> None:
        """Set up the losses for loaded models that are not wrapped yet; no teacher if its logits come with the batch.

        With `document_masks`, position ids restart with every document. Raises SurgeryError: vocabularies differ, or,
        if layers are matched, the numbers of layers or hidden sizes.
        """
        super().__init__()
        self.student = student
        # FSDP wraps these modules one by one. Embeddings and head belong to the root unit, which stays gathered for
        # the whole forward pass, in which the head is called once per chunk of positions.
        self._no_split_modules = list(student._no_split_modules or [])
        self.weights, self._document_masks = weights, document_masks
        self._student = (Body.of(student),)  # a tuple, so that nn.Module does not register it
        self._teacher = (None if teacher is None else Body.of(teacher.eval().requires_grad_(False)),)
        self._vocabulary = vocabulary_of(student)
        self._matches = bool(weights.hidden or weights.layerwise)
        if teacher is not None:
            check_vocabularies(student, teacher)
        if self._matches:
            _check_layers(student, teacher)

    def forward(
        self, batch: Batch, positions: float, cached: TopK | None = None, measure: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute a batch's weighted loss, fp32, and its unweighted parts by name, detached.

        Args:
            positions: divisor of the sums over predicting positions.
            cached: the teacher's top-k logits [B, T - 1], if there is no teacher model.
            measure: compute cross-entropy, forward KL and the teacher's cross-entropy, whatever the objective.
        """
        weights, teacher = self.weights, self._teacher[0]
        if measure:
            weights = ObjectiveWeights(kl=float(teacher is not None), cross_entropy=1.0)
        inputs = batch.tokens, batch.position_ids if self._document_masks else None
        index = batch.predicting
        targets = batch.labels.flatten().index_select(0, index + 1)
        matches = self._matches and not measure
        if weights.layerwise:
            return combine(weights, {"layerwise": self._layerwise(batch, inputs, positions)})
        with ExitStack() as stack:
            teacher_states, recording = None, None
            if teacher is not None and (weights.kl or matches):
                with torch.no_grad():
                    recording = stack.enter_context(recorded(teacher.model, hidden=True)) if matches else None
                    hidden = teacher.states(*inputs).flatten(0, 1).index_select(0, index)
                teacher_states = States(hidden, teacher.head())
            elif cached is not None and weights.kl:
                length = batch.tokens.shape[1]
                teacher_states = cached.map(lambda tensor: tensor[index // length, index % length])
            own = stack.enter_context(recorded(self.student, hidden=True)) if matches else None
            states = self._student[0].states(*inputs)
        student = States(states.flatten(0, 1).index_select(0, index), self._student[0].head())
        # The same number of chunks on every process: each gathers a sharded head.
        chunks = chunk_count(batch.labels[:, 1:].numel(), self._vocabulary)
        losses = logit_losses(weights, student, teacher_states, targets, chunks=chunks, positions=positions)
        if matches:
            losses["hidden"] = matching_loss(own.hidden, recording.hidden, batch.valid, positions)
        loss, parts = combine(weights, losses)
        if measure and teacher_states is not None:
            only = ObjectiveWeights(kl=0.0, cross_entropy=1.0)
            of_teacher = logit_losses(only, teacher_states, None, targets, chunks=chunks, positions=positions)
            parts["teacher_cross_entropy"] = of_teacher["cross_entropy"].detach()
        return loss, parts

    def _layerwise(self, batch: Batch, inputs: tuple, positions: float) -> Tensor:
        """Compute the layer-wise loss: each attention's output against the teacher's on the teacher's input."""
        teacher = self._teacher[0]
        with torch.no_grad(), recorded(teacher.model, attention=True, inputs=True) as recording:
            teacher.states(*inputs)
        with on_teacher_inputs(self.student, recording) as own:
            self._student[0].states(*inputs)
        return matching_loss(own.attention, recording.attention, batch.valid, positions)

    @property
    def needs_logits(self) -> bool:
        """Return whether the teacher's logits must come with each batch."""
        return bool(self.weights.kl) and self._teacher[0] is None

    def measured(self) -> list[str]:
        """Return the names of the losses that `forward` computes with `measure`."""
        return ["cross_entropy"] + (["kl", "teacher_cross_entropy"] if self._teacher[0] is not None else [])


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the model's vocabulary size: the number of its logits."""
    return model.get_output_embeddings().weight.shape[0]


def check_vocabularies(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Raise SurgeryError if the vocabulary sizes differ."""
    sizes = [vocabulary_of(model) for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise SurgeryError(
            f"vocabulary sizes differ: student {sizes[0]}, teacher {sizes[1]}; use the student's source as the teacher"
        )


def shard_layers(model: PreTrainedModel) -> None:
    """Shard a frozen model's layers over all processes (FSDP2); embeddings, norm and head stay replicated."""
    from torch.distributed.fsdp import fully_shard

    for layer in decoder_of(model).layers:
        fully_shard(layer, reshard_after_forward=True)


def _check_layers(student: PreTrainedModel, teacher: PreTrainedModel | None) -> None:
    if teacher is None:
        raise SurgeryError("objectives hidden and layerwise need a teacher model: set teacher, or both weights to 0")
    models = student, teacher
    for name, sizes in (
        ("numbers of layers", [len(decoder_of(model).layers) for model in models]),
        ("hidden sizes", [model.get_input_embeddings().weight.shape[1] for model in models]),
    ):
        if sizes[0] != sizes[1]:
            raise SurgeryError(
                f"{name} differ: student {sizes[0]}, teacher {sizes[1]}; set objectives hidden and layerwise to 0"
            )


def layer_errors(student: Sequence[Tensor], teacher: Sequence[Tensor], valid: BoolTensor, positions: float) -> Tensor:
    """Compute the relative squared error of each layer: [L] in fp32 (fp64 for fp64 inputs).

    Errors of a sequence are divided by the teacher's mean square on that sequence, so that the result does not depend
    on how sequences are dealt to processes and batches.

    Args:
        student, teacher: L tensors [B, T, D]; the teacher's get no gradient.
        valid: mask [B, T] of the positions to compare.
        positions: divisor of the sums over positions.
    """
    sums = [_summed_error(*pair, valid) for pair in zip(student, teacher, strict=True)]
    # Layers of one model may lie on several devices.
    return torch.stack([error.to(sums[0].device) for error in sums]) / positions


def matching_loss(student: Sequence[Tensor], teacher: Sequence[Tensor], valid: BoolTensor, positions: float) -> Tensor:
    """Compute the mean of `layer_errors` over layers, a scalar: the objective's losses `hidden` and `layerwise`."""
    return layer_errors(student, teacher, valid, positions).mean()


@contextmanager
def on_teacher_inputs(student: nn.Module, teacher: Recording) -> Iterator[Recording]:
    """Run each attention of the student on its teacher's input in a ``with`` block; yield a recording of its outputs.

    All other arguments of an attention are the student's own, so classes may differ. The output is recorded with
    gradients, and replaced in the residual stream by the teacher's, so that gradients end in the attention. Only
    attention parameters get gradients: set DDP's `find_unused_parameters` if others are trainable. Under FSDP keep
    weights gathered after the forward pass. `teacher` is a recording of `attention` and `inputs` for the same tokens.
    Gradient checkpointing must be off: it reruns layers after the hooks are removed.
    """
    inputs, outputs = teacher.inputs, teacher.attention

    def give_input(layer: int) -> Callable[..., tuple[tuple, dict[str, Any]]]:
        def give(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            own = args[0] if args else kwargs["hidden_states"]
            states = _same_tokens(inputs[layer], record.seen(layer), own)
            return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

        return give

    def give_output(layer: int) -> Callable[..., Any]:
        def give(module: nn.Module, args: tuple, output: Any) -> Any:
            own = first(output)
            states = _same_tokens(outputs[layer], record.seen(layer) - own.shape[1], own)
            return (states, *output[1:]) if isinstance(output, tuple | list) else states

        return give

    with recorded(student, attention=True) as record, ExitStack() as stack:
        for index, layer in enumerate(decoder_of(student).layers):
            # Registered after the recording's hooks, so that these see the student's own output.
            hook = attention_of(layer).register_forward_pre_hook(give_input(index), with_kwargs=True)
            stack.callback(hook.remove)
            stack.callback(attention_of(layer).register_forward_hook(give_output(index)).remove)
        yield record


def _same_tokens(teacher: Tensor, start: int, own: Tensor) -> Tensor:
    """Return the teacher's states at the tokens of ``own``, the student's, in its dtype and on its device."""
    return teacher[:, start : start + own.shape[1]].detach().to(own)


def _summed_error(student: Tensor, teacher: Tensor, valid: BoolTensor) -> Tensor:
    """Sum one layer's relative squared errors over valid positions; see `layer_errors`."""
    wide = torch.promote_types(student.dtype, torch.float32)
    teacher, valid = teacher.detach().to(student.device, wide), valid.to(student.device)
    errors = (student.to(wide) - teacher).square().mean(-1).where(valid, 0)
    squares = teacher.square().mean(-1).where(valid, 0)
    means = squares.sum(1) / valid.sum(1).clamp(min=1)
    return (errors.sum(1) / means.clamp(min=torch.finfo(wide).tiny)).sum()
