"""Preparation of a run: the accelerator, and the wrapped models and optimizer."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from transformers import PreTrainedModel

from surgery.common.errors import SurgeryError
from surgery.common.removed import removal
from surgery.running.processes import PATIENCE
from surgery.running.source import checked_device
from surgery.training.distillation import Distillation, shard_layers
from surgery.training.models import set_dtypes
from surgery.training.settings import HealSettings
from surgery.training.trackers import tracker_folder

PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
COMPUTED = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Compute dtypes by accelerate's names of mixed precision."""


def open_accelerator(settings: HealSettings) -> Accelerator:
    """Create this process's `Accelerator`; dtype "auto" is bf16 on a GPU that supports it, else fp32.

    Raises SurgeryError: the device or the launcher's configuration does not support the settings.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        checked_device("cuda")  # raises; with a GPU it would create a context on GPU 0 in every process
    dtype = settings.dtype
    if dtype == "auto":
        can = settings.on_gpu() and torch.cuda.is_bf16_supported()
        dtype = "bf16" if can else "fp32"
    if dtype == "fp16" and not settings.on_gpu():
        raise SurgeryError("dtype fp16 needs an accelerator: use bf16 or fp32 on a CPU")
    try:
        accelerator = Accelerator(
            cpu=settings.device == "cpu",
            mixed_precision=PRECISIONS[dtype],
            gradient_accumulation_steps=settings.gradient_accumulation,
            log_with=None if settings.wandb is None else "wandb",
            project_dir=str(tracker_folder(settings)),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
        )
    except (ValueError, ImportError, RuntimeError) as error:
        raise SurgeryError(f"accelerate cannot start: {' '.join(str(error).split())[:300]}") from error
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise SurgeryError(f"DeepSpeed {removal('launcher zero3')}")
    return accelerator


def prepare(
    settings: HealSettings,
    accelerator: Accelerator,
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    document_masks: bool,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build and wrap the `Distillation` module and its AdamW for `Loop`; the student's trainable parameters are set.

    Raises SurgeryError: the model or the launcher's configuration does not support the settings.
    """
    if settings.gradient_checkpointing:
        if not student.supports_gradient_checkpointing:
            raise SurgeryError(
                f"{type(student).__name__} does not support gradient checkpointing: set gradient_checkpointing to false"
            )
        student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module = Distillation(student, settings.weights(), teacher, document_masks=document_masks)
    # After `Distillation`, which runs the student without autocast, and so needs one dtype.
    set_dtypes(student, COMPUTED[accelerator.mixed_precision])
    parameters = [each for each in student.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0)
    module, optimizer = accelerator.prepare(module, optimizer)
    if teacher is not None and settings.shard_teacher:
        if not accelerator.is_fsdp2:
            raise SurgeryError(
                "shard_teacher needs FSDP2: launch with configs/accelerate/fsdp2.yaml, or set it to false",
                setting="shard_teacher",
            )
        shard_layers(teacher)
    return module, optimizer
