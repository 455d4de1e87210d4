"""Student and teacher as one module that gives losses: what the loop trains, and what accelerate wraps.

Everything that touches a student's weights happens in one `forward`, so that DDP, FSDP and DeepSpeed see it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import BoolTensor, LongTensor, Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.eval.logits import LogitReader, evaluation_mode
from surgery.training.chunks import States, chunk_count
from surgery.training.data import Batch, holds_several
from surgery.training.known_documents import known_documents
from surgery.training.matching import matching_loss, on_teacher_inputs
from surgery.training.objectives import ObjectiveWeights, combine, logit_losses, predicting
from surgery.training.recording import Recording, decoder_of, recorded, same_layers
from surgery.training.top_k import TopK


@dataclass(frozen=True)
class Body:
    """A causal model in two parts: what makes hidden states, and what makes logits of them.

    Attributes:
        model: the whole.
        splits: whether its logits are those of a linear head on its body's states; otherwise, as with a softcap behind
            the head, the states are its logits themselves, all positions' at once.
    """

    model: PreTrainedModel
    splits: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> Body:
        """Finds out by trying, on the model as it stands."""
        device = next(model.parameters()).device
        tokens = torch.arange(8, device=device)[None] % model.get_input_embeddings().weight.shape[0]
        with torch.no_grad(), evaluation_mode(model):
            return cls(model, LogitReader(model, tokens).splits)

    def states(
        self, tokens: LongTensor, position_ids: LongTensor | None, spans: Sequence[Sequence[slice]] | None = None
    ) -> Tensor:
        """Final hidden states [B, T, D], or logits [B, T, V] where the model does not split.

        Args:
            spans: tokens of each document of each row, by which the positions start again, where that is known.
        """
        packed = None if spans is None else position_ids is not None and holds_several(spans)
        call = {"input_ids": tokens, "use_cache": False}
        if position_ids is not None:
            call["position_ids"] = position_ids
        if packed and hasattr(self.model.config, "attention_layers"):  # this package's class, which would look itself
            call["documents"] = spans
        with known_documents(packed):
            if self.splits:
                return self.model.base_model(**call).last_hidden_state
            return self.model(**call).logits

    def head(self) -> nn.Module:
        """Return the module that makes logits of `states`."""
        return self.model.get_output_embeddings() if self.splits else nn.Identity()


class Distillation(nn.Module):
    """The losses of a student against its teacher, on one batch.

    Only the student is a submodule: its teacher is neither trained, saved nor sharded with it.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        weights: ObjectiveWeights,
        teacher: PreTrainedModel | None = None,
        *,
        document_masks: bool = False,
    ) -> None:
        """Prepare the losses of models that are loaded and not wrapped.

        Args:
            weights: of the objective.
            teacher: None where no part needs it, or its logits come with the batch.
            document_masks: whether attention keeps inside of documents, by positions that restart.

        Raises:
            SurgeryError: vocabularies differ, or the numbers of layers or hidden sizes where layers are matched.
        """
        super().__init__()
        self.student = student
        # By this FSDP knows what to shard apart. Not so the embeddings and the head: they are gathered with the rest
        # for the length of the whole forward pass, in which the head is called once for every chunk of positions.
        self._no_split_modules = list(student._no_split_modules or [])
        self.weights, self._document_masks = weights, document_masks
        self._student = (Body.of(student),)  # in tuples, out of sight of nn.Module
        self._teacher = (None if teacher is None else Body.of(teacher.eval().requires_grad_(False)),)
        self._vocabulary = vocabulary_of(student)
        self._matches = bool(weights.hidden or weights.attention or weights.layerwise)
        if teacher is not None:
            check_vocabularies(student, teacher)
        if self._matches:
            _check_layers(student, teacher)

    def forward(
        self, batch: Batch, positions: float, cached: TopK | None = None, measure: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses of one batch.

        Args:
            batch: on the student's device.
            positions: what the sums over predicting positions are divided by.
            cached: the teacher's logits [B, T - 1], where it is not here itself.
            measure: take cross-entropy and forward KL whatever the objective, and the teacher's own cross-entropy.

        Returns:
            The weighted loss, fp32, with gradients if they are enabled; its parts without, of weight 1, by name.
        """
        weights, teacher = self.weights, self._teacher[0]
        if measure:
            weights = ObjectiveWeights(kl=float(teacher is not None), cross_entropy=1.0)
        position_ids = batch.position_ids if self._document_masks and batch.packed else None
        inputs = batch.tokens, position_ids, batch.spans
        index = batch.predicting
        targets = batch.labels.flatten().index_select(0, index + 1)
        matches = self._matches and not measure
        if weights.layerwise:
            return combine(weights, {"layerwise": self._layerwise(batch, inputs, positions)})
        with ExitStack() as stack:
            teacher_states, recording = None, None
            if teacher is not None and (weights.needs_teacher or matches):
                with torch.no_grad():
                    recording = self._recording(stack, teacher.model) if matches else None
                    hidden = teacher.states(*inputs).flatten(0, 1).index_select(0, index)
                teacher_states = States(hidden, teacher.head())
            elif cached is not None and weights.needs_teacher:
                length = batch.tokens.shape[1]
                teacher_states = cached.map(lambda tensor: tensor[index // length, index % length])
            own = self._recording(stack, self.student) if matches else None
            states = self._student[0].states(*inputs)
        student = States(states.flatten(0, 1).index_select(0, index), self._student[0].head())
        # The same number of chunks on every process: each gathers a sharded head.
        chunks = chunk_count(batch.labels[:, 1:].numel(), self._vocabulary)
        losses = logit_losses(weights, student, teacher_states, targets, chunks=chunks, positions=positions)
        if matches:
            valid = _valid(batch)
            for name in ("hidden", "attention"):
                if getattr(weights, name):
                    losses[name] = matching_loss(getattr(own, name), getattr(recording, name), valid, positions)
        loss, parts = combine(weights, losses)
        if measure and teacher_states is not None:
            only = ObjectiveWeights(kl=0.0, cross_entropy=1.0)
            of_teacher = logit_losses(only, teacher_states, None, targets, chunks=chunks, positions=positions)
            parts["teacher_cross_entropy"] = of_teacher["cross_entropy"].detach()
        return loss, parts

    def _layerwise(self, batch: Batch, inputs: tuple, positions: float) -> Tensor:
        """Return the distance of each attention's output from its teacher's on the same input."""
        teacher = self._teacher[0]
        with torch.no_grad(), recorded(teacher.model, attention=True, inputs=True) as recording:
            teacher.states(*inputs)
        with on_teacher_inputs(self.student, recording) as own:
            self._student[0].states(*inputs)
        return matching_loss(own.attention, recording.attention, _valid(batch), positions)

    def _recording(self, stack: ExitStack, model: nn.Module) -> Recording:
        return stack.enter_context(
            recorded(model, hidden=bool(self.weights.hidden), attention=bool(self.weights.attention))
        )

    @property
    def needs_logits(self) -> bool:
        """Return whether the teacher's logits must come with each batch."""
        return self.weights.needs_teacher and self._teacher[0] is None

    def measured(self) -> list[str]:
        """Names of the parts that `forward` gives when it measures."""
        return ["cross_entropy"] + (["kl", "teacher_cross_entropy"] if self._teacher[0] is not None else [])


def _valid(batch: Batch) -> BoolTensor:
    """The positions [B, T] that predict something, as a mask."""
    return pad(predicting(batch.labels), (0, 1))


def vocabulary_of(model: PreTrainedModel) -> int:
    """Tokens that the model has logits for."""
    return model.get_output_embeddings().weight.shape[0]


def check_vocabularies(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Raises SurgeryError unless both have logits for as many tokens."""
    sizes = [vocabulary_of(model) for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise SurgeryError(
            f"the student has {sizes[0]} tokens, the teacher {sizes[1]}: give the model that the student was made from"
        )


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles each decoder layer where it stands; they share their code, so one compilation does for all."""
    for layer in decoder_of(model).layers:
        layer.compile()


def shard_layers(model: PreTrainedModel) -> None:
    """Shards a frozen model's layers over all processes (FSDP2); embeddings, norm and head stay whole on each."""
    from torch.distributed.fsdp import fully_shard

    for layer in decoder_of(model).layers:
        fully_shard(layer, reshard_after_forward=True)


def _check_layers(student: PreTrainedModel, teacher: PreTrainedModel | None) -> None:
    if teacher is None:
        raise SurgeryError("matching layers needs the teacher itself: give it, or set hidden and attention to 0")
    same_layers(student, list(decoder_of(teacher).layers))
    sizes = [model.get_input_embeddings().weight.shape[1] for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise SurgeryError(f"hidden sizes {sizes[0]} and {sizes[1]}: their layers cannot be matched")
