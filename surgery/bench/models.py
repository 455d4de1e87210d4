"""Models of random weights for `surgery bench decode`: a named shape, and what conversions make of it.

Times and memory do not depend on what weights say, so nothing is converted: the converted model's config is written as
a conversion would, and filled at random on the device.
"""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from surgery import model as own_model
from surgery.bench.shapes import DECODE_SHAPES
from surgery.common.errors import SurgeryError
from surgery.running.loading import without_initial_values
from surgery.structures.base import ConfigOf
from surgery.structures.registry import TARGETS


def source_config(shape: str) -> PreTrainedConfig:
    """The config of one of `DECODE_SHAPES`."""
    config = dict(DECODE_SHAPES[shape])
    return CONFIG_MAPPING[config.pop("model_type")](**config)


def converted_configs() -> dict[str, ConfigOf]:
    """Return the configs of what ``--to`` can name, those of installed packages among them."""
    targets = [target for target in TARGETS.working().values() if not target.fixed]
    return {
        target.name + form: config for target in targets for form, config in target.structure().bench_configs().items()
    }


def random_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """A model with weights from N(0, 0.02), made on the device in the config's dtype."""
    own_model.register()
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else getattr(torch, config.dtype or "bfloat16")
    with torch.device("meta"), without_initial_values():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
    model.tie_weights()
    _refill_buffers(model)
    return model.eval()


@torch.no_grad()
def _refill_buffers(model: PreTrainedModel) -> None:
    """Buffers hold nothing after `to_empty`: those of rotations are computed by their own classes again.

    Raises:
        SurgeryError: a class does not.
    """
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    for module in model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            if hasattr(module, "initialize_weights"):
                module.initialize_weights()
            else:
                model._init_weights(module)
    for name, buffer in model.named_buffers():
        if not buffer.isfinite().all():
            raise SurgeryError(f"{type(model).__name__}: {name} cannot be computed without a checkpoint")
