"""Models with random weights for `surgery bench decode`: named shapes and their conversions.

Speed and memory do not depend on the values of weights, so nothing is converted: the model is created from the config
that a conversion would write, with random weights on the device.
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
    """Build the config of one of `DECODE_SHAPES`."""
    config = dict(DECODE_SHAPES[shape])
    return CONFIG_MAPPING[config.pop("model_type")](**config)


def converted_configs() -> dict[str, ConfigOf]:
    """Return the config builder of each target of ``--to``, those of installed plugins included."""
    targets = [target for target in TARGETS.working().values() if not target.fixed]
    return {
        target.name + form: config for target in targets for form, config in target.structure().bench_configs().items()
    }


def random_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """Create a model on the device in the config's dtype: norm weights 1, other weights from N(0, 0.02)."""
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
    """Recompute buffers, such as RoPE frequencies, which are uninitialized after `to_empty`.

    Raises SurgeryError: a buffer that its class does not initialize.
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
            raise SurgeryError(f"{type(model).__name__}: buffer {name} is not initialized without a checkpoint")
