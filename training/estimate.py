"""Memory and FLOPs of a healing run, estimated from the shapes of its models.

With N_t the trainable parameters, N_f the student's frozen ones, N_s the teacher's, c the bytes of an element in the
compute dtype, B T the tokens of a batch, D the hidden size, L layers and p processes, the peak memory of a device is
the sum of

    trainable weights     16 N_t           in fp32, with gradients and Adam's moments
    other weights         c N_f
    copies                c N_t below fp32, for autocast; 4 N_t for gradients where DDP averages them
    teacher               c N_s            none if its logits come from disk
    activations           c B T A          A: inputs and outputs of the layers' matrices; with gradient checkpointing
                                           L D + the largest layer's
    logits                6 chunks of fp32 logits

FSDP2 divides all but the teacher, activations and logits by p, and copies two layers, embeddings and head. With
`shard_teacher` it divides the teacher's layers too. FLOPs are 6 per token and matrix parameter of the student, 8 with
gradient checkpointing, and 2 of the teacher; the T² terms of attention are left out.

Compared with all allocations of PyTorch in a step of the demo model on a CPU (attention or all trained, fp32 or bf16,
with and without gradient checkpointing, rows of 256 and 1,024 tokens), the estimated peak is off by -13% to +10%
(`tests/training/test_estimate.py`). Left out: CUDA's context and fragmentation (a GiB or more), norms, softmax, masks,
data, loading and saving. A layer-wise stage takes less.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.running.experts import share_of_experts
from surgery.running.loading import load_config, with_standard_names, without_initial_values
from surgery.running.unfused import language_model
from surgery.training.chunks import chunk_count
from surgery.training.recording import decoder_of
from surgery.training.settings import HealSettings
from surgery.training.trainable import choose_parameters

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element by compute dtype."""

LOGIT_TENSORS = 6
"""Tensors of the size of a chunk's fp32 logits that a divergence holds at a time."""


@dataclass(frozen=True)
class Estimate:
    """Forecast of a healing run.

    Attributes:
        parameters: numbers of parameters: "student", "trained" and "teacher".
        processes: number of processes, of one device each.
        sharded: whether FSDP2 shards the student.
        tokens_per_step: over all processes.
        steps, tokens: budget of the run; None if only time limits it.
        memory: peak bytes of a device by part.
        total_flops: FLOPs of the whole budget over all processes; None if only time limits it.
    """

    parameters: dict[str, int]
    processes: int
    sharded: bool
    tokens_per_step: int
    steps: int | None
    tokens: int | None
    memory: dict[str, int]
    total_flops: int | None

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of one device."""
        return sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"peak_bytes": self.peak_bytes}


def config_of(reader: CheckpointReader, settings: HealSettings) -> PreTrainedConfig:
    """Load a checkpoint's config; for a vision-language model that of its language model, the part that trains.

    Raises SurgeryError: transformers does not know the architecture.
    """
    reader = language_model(reader)
    return with_standard_names(load_config(reader.path, trust_remote_code=settings.trust_remote_code))


def estimate(
    student_config: PreTrainedConfig,
    teacher_config: PreTrainedConfig | None,
    settings: HealSettings,
    processes: int = 1,
    *,
    sharded: bool = False,
) -> Estimate:
    """Estimate memory and FLOPs of a healing run without loading weights or touching a device.

    Args:
        student_config, teacher_config: configs of the models; None for no teacher.
        settings: with a dtype other than "auto".
        sharded: whether FSDP2 shards the student over all processes.

    Raises:
        SurgeryError: dtype is "auto", or nothing would train.
    """
    if settings.dtype not in WIDTHS:
        raise SurgeryError(f"dtype {settings.dtype} depends on the device: choose fp32, bf16 or fp16", setting="dtype")
    settings = settings.with_batches(processes)
    student = _on_meta(student_config, settings)
    teacher = None if teacher_config is None else _on_meta(teacher_config, settings)
    choose_parameters(student, settings)
    steps = settings.most_steps(processes)
    per_step = settings.global_batch(processes) * settings.length
    tokens = None if steps is None else steps * per_step
    return Estimate(
        parameters={
            "student": _size(student),
            "trained": _size(student, trained=True),
            "teacher": 0 if teacher is None else _size(teacher),
        },
        processes=processes,
        sharded=sharded,
        tokens_per_step=per_step,
        steps=steps,
        tokens=tokens,
        memory=_memory(student, teacher, settings, processes, sharded=sharded),
        total_flops=None if tokens is None else tokens * _flops_per_token(student, teacher, settings),
    )


def _memory(
    student: PreTrainedModel, teacher: PreTrainedModel | None, settings: HealSettings, processes: int, *, sharded: bool
) -> dict[str, int]:
    """Compute the peak bytes of a device, by part."""
    width, parts, trained = WIDTHS[settings.dtype], processes if sharded else 1, _size(student, trained=True)
    layers, rest = _layers_and_rest(student)
    copies = 4 * trained if processes > 1 and not sharded else 0
    copies += width * (2 * max(layers) + rest if sharded else trained * (width < 4))
    memory = {
        "weights that train": 4 * trained // parts,
        "gradients": 4 * trained // parts,
        "Adam's moments": 8 * trained // parts,
        "other weights": width * (_size(student) - trained) // parts,
        "copies": copies,
    }
    if teacher is not None and settings.teacher_logits is None:
        of_layers, others = _layers_and_rest(teacher)
        memory["teacher"] = width * (sum(of_layers) // (processes if settings.shard_teacher else 1) + others)
    positions, vocabulary = settings.batch_size * settings.length, student.get_output_embeddings().weight.shape[0]
    memory["activations"] = width * positions * _activations(student, checkpointing=settings.gradient_checkpointing)
    memory["logits"] = LOGIT_TENSORS * 4 * -(-positions // chunk_count(positions, vocabulary)) * vocabulary
    return memory


def _activations(student: PreTrainedModel, *, checkpointing: bool) -> int:
    """Count the elements that a token keeps for the backward pass: A of the module docstring."""
    hidden = student.get_input_embeddings().weight.shape[1]
    layers = [sum(_width(matrix, student) for matrix in _matrices(layer)) for layer in decoder_of(student).layers]
    return len(layers) * hidden + max(layers) if checkpointing else sum(layers)


def _width(matrix: torch.Tensor, model: PreTrainedModel) -> int:
    """Count the inputs and outputs of a matrix; for a 3D tensor of experts, over the experts that a token uses."""
    experts = matrix.shape[0] * share_of_experts(model.config) if matrix.ndim == 3 else 1
    return round(experts * (matrix.shape[-2] + matrix.shape[-1]))


def _flops_per_token(student: PreTrainedModel, teacher: PreTrainedModel | None, settings: HealSettings) -> int:
    """Count the FLOPs of a token: forward and backward pass of the student, forward pass of the teacher."""
    passes = 4 if settings.gradient_checkpointing else 3
    return 2 * passes * _active_parameters(student) + (0 if teacher is None else 2 * _active_parameters(teacher))


def _active_parameters(model: PreTrainedModel) -> int:
    """Count the active matrix parameters of a token in layers and head."""
    share = share_of_experts(model.config)
    matrices = [*_matrices(decoder_of(model).layers), model.get_output_embeddings().weight]
    return sum(round(each.numel() * (share if each.ndim == 3 else 1)) for each in matrices)


def _matrices(module: torch.nn.Module) -> list[torch.Tensor]:
    return [each for each in module.parameters() if each.ndim >= 2]


def _layers_and_rest(model: PreTrainedModel) -> tuple[list[int], int]:
    """Count the parameters of each decoder layer, and those outside the layers."""
    layers = [_size(layer) for layer in decoder_of(model).layers]
    return layers, _size(model) - sum(layers)


def _size(module: torch.nn.Module, *, trained: bool = False) -> int:
    return sum(each.numel() for each in module.parameters() if each.requires_grad or not trained)


def _on_meta(config: PreTrainedConfig, settings: HealSettings) -> PreTrainedModel:
    with torch.device("meta"), without_initial_values():
        return AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
