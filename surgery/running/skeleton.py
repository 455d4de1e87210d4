"""Custom-class models on the meta device, to compute shapes and bytes before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from surgery import model as own_model
from surgery.checkpoint.config_file import arguments
from surgery.common.errors import SurgeryError
from surgery.running.loading import LOADING, without_initial_values

if TYPE_CHECKING:
    from surgery.model import SurgeryForCausalLM


def skeleton(config: dict, dtype: torch.dtype) -> SurgeryForCausalLM:
    """Build the model of a config.json on the meta device. Raises SurgeryError: the config is invalid."""
    from transformers import AutoModelForCausalLM

    own_model.register()
    try:
        with torch.device("meta"), without_initial_values():
            return AutoModelForCausalLM.from_config(own_model.SurgeryConfig(**arguments(config)), dtype=dtype)
    except LOADING as error:
        raise SurgeryError(str(error) or repr(error)) from None
