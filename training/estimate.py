"""What a healing will take, from shapes alone: bytes of a device, FLOPs of a token, and the time they make.

With N_t the parameters that train, N_f the student's others, N_s the teacher's, c the bytes of a number that is
computed with, B T the tokens of a batch, D the hidden size, L layers and p processes, a device holds all through

    weights that train    4 N_t            fp32, whatever is computed in
    other weights         c N_f
    teacher               c N_s            none where its logits come from the disk
    gradients             4 N_t            twice that where DDP averages them
    Adam's moments        8 N_t

of which FSDP2 divides all by p but the teacher (its layers too with `shard_teacher`). On top come, and the peak is with
the largest of the three,

    forward     kept + casts of N_t + gathered + hidden states 4 B T D c + 3 to 9 chunks of fp32 logits
    backward    kept + gradients inside of one layer + gathered
    step        4 N_t, AdamW's own tensors where it updates all parameters at once

"Kept" is what autograd saves, see `kept`: a sum over layers without gradient checkpointing; with it L B T D c, the
layers' inputs (Chen et al., arXiv:1604.06174), and one layer's in the backward pass. "Gathered" are, under FSDP2, two
layers, embeddings and head. FLOPs of a forward pass are 2 for each parameter of a matrix that a token passes and
2 T H (d_qk + d_v) for attention, H heads of these widths; of a backward pass as many for gradients of inputs (twice for
attention) and 2 for each matrix parameter that trains. What is computed again counts.

Rows are taken to hold several documents, which takes masks; models that do not keep attention inside of documents take
a little less. Left out: CUDA's own memory and fragments (a GiB or more), buffers, factors of entries, held-out
measurements, data, loading and saving; that gradients need not go below the first parameter that trains; and that
kernels skip what masks leave out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.running.experts import share_of_experts
from surgery.training.chunks import LOGIT_BYTES, chunk_count
from surgery.training.kept import Kept, follow
from surgery.training.objectives import ObjectiveWeights
from surgery.training.recording import decoder_of
from surgery.training.settings import HealSettings
from surgery.training.shapes import built, choose_as_asked, give_storages
from surgery.training.trainable import in_attention

WIDTHS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.bfloat16}
"""What stands for each dtype in shapes; both halves have one size."""

BACKWARD = 0.5
"""Bytes of gradients that live at once while a layer goes backward, as a share of what the layer keeps. Allocations
in layers of Llama-3-8B's shape, followed on fake tensors, make it 0.4."""

PIECES = {"kl": 6, "reverse_kl": 6, "jsd": 9, "cross_entropy": 3}
"""Tensors of the size of a chunk's fp32 logits that a loss has at once, followed likewise, rounded up. Of several
losses the greediest counts."""


@dataclass(frozen=True)
class Estimate:
    """What a healing will take.

    Attributes:
        parameters: of the student, those that train, and the teacher's.
        processes: of one device each.
        sharded: whether FSDP2 or ZeRO-3 shards the student.
        tokens_per_step: of all processes.
        steps, tokens: of the budget; None where only time ends it.
        held: bytes of a device all through, by part.
        phases: bytes that come on top in the forward and backward pass and the optimizer's step, by part.
        flops_per_token: by part.
    """

    parameters: dict[str, int]
    processes: int
    sharded: bool
    tokens_per_step: int
    steps: int | None
    tokens: int | None
    held: dict[str, int]
    phases: dict[str, dict[str, int]]
    flops_per_token: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """Of one device."""
        return sum(self.held.values()) + max(sum(parts.values()) for parts in self.phases.values())

    @property
    def total_flops(self) -> int | None:
        """Of the whole budget, all processes."""
        return None if self.tokens is None else self.tokens * sum(self.flops_per_token.values())

    def seconds(self, peak_flops: float, utilisation: float) -> float | None:
        """Time of the training itself, for a budget of tokens or steps.

        Args:
            peak_flops: of one device, per second, in the dtype that is computed in.
            utilisation: share of it that all FLOPs counted here are done at.

        Raises:
            SurgeryError: these are not positive, or the share is above 1.
        """
        if not (peak_flops > 0 and 0 < utilisation <= 1):
            raise SurgeryError(
                f"a peak of {peak_flops:g} FLOP/s at a utilisation of {utilisation:g}: give a positive peak and a share"
                " from 0 to 1"
            )
        return None if self.total_flops is None else self.total_flops / (self.processes * peak_flops * utilisation)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"peak_bytes": self.peak_bytes, "total_flops": self.total_flops}


def estimate(
    student_config: PreTrainedConfig,
    teacher_config: PreTrainedConfig | None,
    settings: HealSettings,
    processes: int = 1,
    *,
    sharded: bool = False,
) -> Estimate:
    """Counts what a healing with these settings takes; nothing is loaded and no device looked at.

    Args:
        student_config, teacher_config: of the models; None for no teacher.
        settings: with a dtype that is none of the device's choosing.
        sharded: over all processes, as FSDP2 does.

    Raises:
        SurgeryError: dtype is "auto", nothing would train, or a model cannot be followed on shapes alone.
    """
    if settings.dtype not in WIDTHS:
        raise SurgeryError(f"dtype {settings.dtype} depends on the device: say fp32, bf16 or fp16")
    weights, computed = settings.weights(), WIDTHS[settings.dtype]
    student = built(student_config, settings).train()
    teacher = None if teacher_config is None else built(teacher_config, settings).requires_grad_(False)
    choose_as_asked(student, teacher, settings)
    trained = {name for name, each in student.named_parameters() if each.requires_grad}
    shape = (settings.batch_size, settings.length)
    with FakeTensorMode():
        # FSDP2 gathers weights in what is computed in, and nothing is cast.
        give_storages(student, computed, masters=computed if sharded else torch.float32)
        if teacher is not None:
            give_storages(teacher, computed, masters=computed)
        tokens = torch.zeros(shape, dtype=torch.long)
        positions = (torch.arange(shape[1]) % -(-shape[1] // 2)).expand(shape)
        try:
            kept = follow(student, teacher, weights, tokens, positions, computed)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise SurgeryError(
                f"{type(student).__name__} cannot be followed on shapes alone ({reason}): heal a few steps, and read"
                " memory and tokens/s in its log"
            ) from error
    counts = _counts(student, trained)
    teacher_here = teacher is not None and settings.teacher_logits is None
    held, phases = _memory(
        counts, student, teacher if teacher_here else None, kept, settings, processes, sharded=sharded
    )
    steps = settings.most_steps(processes)
    per_step = settings.global_batch(processes) * settings.length
    return Estimate(
        parameters={
            "student": counts["all"],
            "trained": counts["trained"],
            "teacher": 0 if teacher is None else sum(each.numel() for each in teacher.parameters()),
        },
        processes=processes,
        sharded=sharded,
        tokens_per_step=per_step,
        steps=steps,
        tokens=None if steps is None else steps * per_step,
        held=held,
        phases=phases,
        flops_per_token=_flops(student, teacher, trained, kept, settings),
    )


def _counts(student: PreTrainedModel, trained: set[str]) -> dict[str, int]:
    parameters = dict(student.named_parameters())
    return {
        "all": sum(each.numel() for each in parameters.values()),
        "trained": sum(parameters[name].numel() for name in trained),
    }


def _memory(
    counts: dict[str, int],
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    kept: Kept,
    settings: HealSettings,
    processes: int,
    *,
    sharded: bool,
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Bytes of a device: held all through, and on top in each phase."""
    computed, weights = WIDTHS[settings.dtype].itemsize, settings.weights()
    trains, parts = counts["trained"], processes if sharded else 1
    held = {
        "weights that train": 4 * trains // parts,
        "other weights": computed * (counts["all"] - trains) // parts,
        "gradients": 4 * trains // parts,
        "Adam's moments": 8 * trains // parts,
    }
    if processes > 1 and not sharded:
        held["gradients on their way"] = 4 * trains
    if teacher is not None:
        layers, rest = _layers_and_rest(teacher)
        shards = processes if sharded and settings.shard_teacher else 1
        held["teacher"] = computed * (sum(layers) // shards + rest)
    gathered = {}
    if sharded:
        layers, rest = _layers_and_rest(student)
        # The layer that runs and the next; embeddings, norm and head for the length of the forward pass.
        gathered = {"gathered weights": computed * (2 * max(layers) + rest)}
    states = settings.batch_size * settings.length * student.get_input_embeddings().weight.shape[1] * computed
    largest = max(kept.layers)
    activations, casts, again = kept.outside + sum(kept.layers), 0, 0
    if settings.gradient_checkpointing:
        activations = kept.outside + len(kept.layers) * states
        # Autocast holds them to the end of the forward pass; without checkpointing they are kept anyway.
        casts = 0 if sharded or computed == 4 else computed * trains
        again = largest
    forward = {"activations": activations, "casts of weights": casts, **gathered}
    if not weights.layerwise:
        forward |= {"hidden states": 4 * states, "logits": _logit_bytes(student, settings, weights)}
    backward = {"activations": activations, "one layer": again + int(BACKWARD * largest), **gathered}
    return held, {"forward": forward, "backward": backward, "step": {"of the optimizer": 4 * trains // parts}}


def _logit_bytes(student: PreTrainedModel, settings: HealSettings, weights: ObjectiveWeights) -> int:
    vocabulary, positions = _vocabulary(student), settings.batch_size * (settings.length - 1)
    rows = -(-positions // chunk_count(positions, vocabulary, LOGIT_BYTES))
    return 4 * rows * vocabulary * max((PIECES[name] for name in weights.parts() if name in PIECES), default=0)


def _flops(
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    trained: set[str],
    kept: Kept,
    settings: HealSettings,
) -> dict[str, int]:
    """FLOPs of a token by part."""
    tokens, weights = settings.batch_size * settings.length, settings.weights()
    attention, matrices = kept.student_attention // tokens, _matrices(student)
    body, updated = 2 * sum(matrices.values()), 2 * sum(n for name, n in matrices.items() if name in trained)
    head = 2 * student.get_output_embeddings().weight.numel()
    if weights.layerwise:
        inside = 2 * sum(n for name, n in matrices.items() if in_attention(name))
        found = {"student forward": body + attention, "student backward": inside + updated + 2 * attention}
        head = 0
    else:
        if student.get_output_embeddings().weight.requires_grad:
            updated += head
        found = {
            "student forward": body + attention + head,
            "student backward": body + 2 * attention + head + updated,
        }
    chunks = chunk_count(tokens - settings.batch_size, _vocabulary(student))
    again = (body + attention if settings.gradient_checkpointing else 0) + (head if chunks > 1 else 0)
    if teacher is not None:
        theirs = 0 if weights.layerwise else 2 * teacher.get_output_embeddings().weight.numel()
        found["teacher forward"] = 2 * sum(_matrices(teacher).values()) + kept.teacher_attention // tokens + theirs
        again += theirs if chunks > 1 else 0
    return {**found, "computed again": again}


def _matrices(model: PreTrainedModel) -> dict[str, int]:
    """Parameters of matrices that one token passes, by name, without embeddings and head."""
    vocabulary = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    share = share_of_experts(model.config)
    return {
        name: round(each.numel() * (share if ".experts." in name else 1.0))
        for name, each in model.named_parameters()
        if each.ndim >= 2 and id(each) not in vocabulary
    }


def _layers_and_rest(model: PreTrainedModel) -> tuple[list[int], int]:
    """Parameters of each decoder layer, and of all else."""
    layers = [_size(layer) for layer in decoder_of(model).layers]
    return layers, _size(model) - sum(layers)


def _size(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _vocabulary(model: PreTrainedModel) -> int:
    return model.get_output_embeddings().weight.shape[0]
