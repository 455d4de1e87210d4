"""Choice of trainable parameters: all, attention, or LoRA adapters of it."""

from __future__ import annotations

import re

from torch import nn

from surgery.common.errors import SurgeryError
from surgery.training.settings import HealSettings

ATTENTION = frozenset({"self_attn", "attn", "attention", "self_attention"})
"""Names of attention modules in decoder layers of transformers."""


def choose_parameters(student: nn.Module, settings: HealSettings) -> None:
    """Set `requires_grad` of the student's parameters by the settings; `train="lora"` adds adapters.

    Raises SurgeryError: nothing would train.
    """
    if settings.train == "lora":
        add_adapters(student, settings.lora_rank, settings.lora_alpha)
        return
    count = 0
    for name, parameter in student.named_parameters():
        trains = parameter.is_floating_point() and (settings.train == "all" or in_attention(name))
        parameter.requires_grad_(trains)
        count += trains
    if not count:
        raise SurgeryError("no parameters to train: the model has no attention modules; set train to all")


def add_adapters(model: nn.Module, rank: int, alpha: float) -> nn.Module:
    """Add LoRA adapters (Hu et al., arXiv:2106.09685) to the linear modules of attention in place with PEFT.

    Only the adapters train. Returns the PEFT model around it, which saves and merges adapters. Raises SurgeryError:
    peft is not installed, or attention has no linear modules.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise SurgeryError("lora needs peft: pip install peft") from None
    modules = model.named_modules()
    targets = [name for name, module in modules if isinstance(module, nn.Linear) and in_attention(name)]
    if not targets:
        raise SurgeryError("no parameters to train: attention has no linear modules; set train to all")
    # A list of names would also match names that end in them; a regular expression matches whole names.
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules="|".join(map(re.escape, targets))))


def in_attention(name: str) -> bool:
    """Return whether a module or parameter of this name belongs to a decoder layer's attention."""
    return any(part in ATTENTION for part in name.split("."))
