"""A model of the project's own class without memory: what shapes and bytes are asked of before anything is written."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from surgery import model as own_model
from surgery.common.errors import SurgeryError
from surgery.model import SurgeryForCausalLM
from surgery.running.loading import LOADING


def skeleton(config: dict, dtype: torch.dtype) -> SurgeryForCausalLM:
    """The model of a config.json, on the meta device.

    Raises:
        SurgeryError: it is impossible.
    """
    own_model.register()
    fields = {name: _floats(value) for name, value in config.items() if name not in ("model_type", "auto_map")}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(own_model.SurgeryConfig(**fields), dtype=dtype)
    except LOADING as error:
        raise SurgeryError(str(error) or repr(error)) from None


def _floats(value: Any) -> Any:
    """A value of config.json, in which transformers writes infinity as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_floats(each) for each in value]
    return float(value["__float__"]) if isinstance(value, dict) and value.keys() == {"__float__"} else value
