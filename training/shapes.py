"""Models that have shapes and no numbers: built on the meta device, or as fake tensors that think they are on a CPU."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from surgery.checkpoint import CheckpointReader
from surgery.running.loading import load_config, with_standard_names
from surgery.running.unfused import language_model
from surgery.training.settings import HealSettings
from surgery.training.trainable import add_adapters, choose


def config_of(reader: CheckpointReader, settings: HealSettings) -> PreTrainedConfig:
    """A checkpoint's config; of a model of pictures and text that of its language model, which is what trains.

    Raises:
        SurgeryError: transformers does not know it.
    """
    reader = language_model(reader)
    return with_standard_names(load_config(reader.path, trust_remote_code=settings.trust_remote_code))


def built(config: PreTrainedConfig, settings: HealSettings) -> PreTrainedModel:
    """A causal model on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)


def give_storages(model: nn.Module, computed: torch.dtype, *, masters: torch.dtype) -> None:
    """Makes meta tensors fake ones of the CPU, where autocast works: what trains in ``masters``, the rest as computed.

    Buffers keep their dtypes.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by what they replace, kept so that ids stay theirs
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is not None and id(old) not in made:
                    dtype = old.dtype
                    if isinstance(old, nn.Parameter) and dtype.is_floating_point:
                        dtype = masters if old.requires_grad else computed
                    new = torch.empty(old.shape, dtype=dtype)
                    made[id(old)] = (
                        old,
                        (nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new),
                    )
                table[name] = None if old is None else made[id(old)][1]


def choose_as_asked(student: PreTrainedModel, teacher: PreTrainedModel | None, settings: HealSettings) -> None:
    """Lets train what the settings say, adapters included.

    Raises:
        SurgeryError: nothing would train.
    """
    if settings.train == "lora":
        add_adapters(student, settings.lora_rank, settings.lora_alpha, settings.lora_modules)
        return
    shapes = None if teacher is None else {name: tuple(each.shape) for name, each in teacher.named_parameters()}
    choose(student, settings.train, teacher_shapes=shapes, patterns=settings.train_patterns)
