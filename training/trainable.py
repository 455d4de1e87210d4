"""Choice of trainable parameters: all, attention, those that the teacher does not have, or LoRA adapters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from surgery.common.errors import SurgeryError
from surgery.training.settings import HealSettings, named

ATTENTION = frozenset({"self_attn", "attn", "attention", "self_attention"})
"""Names of attention modules in decoder layers of transformers."""


def choose_parameters(student: nn.Module, settings: HealSettings, teacher: nn.Module | None) -> None:
    """Set `requires_grad` of the student's parameters by the settings; `train="lora"` adds adapters.

    Raises SurgeryError: nothing would train, or a pattern matches no module.
    """
    if settings.train == "lora":
        add_adapters(student, settings.lora_rank, settings.lora_alpha, settings.lora_modules)
        return
    shapes = None if teacher is None else {name: tuple(each.shape) for name, each in teacher.named_parameters()}
    choose(student, settings.train, teacher_shapes=shapes)


def choose(model: nn.Module, train: str, *, teacher_shapes: Mapping[str, Sequence[int]] | None = None) -> list[str]:
    """Set `requires_grad` for the chosen parameters only; return their names in the model's order.

    `train` is "all"; "attention", all parameters of attention modules; or "new", parameters that the teacher does not
    have with the same name and shape. Raises SurgeryError: nothing would train.
    """
    parameters = dict(model.named_parameters())
    names = [
        name
        for name, parameter in parameters.items()
        if parameter.is_floating_point() and _chosen(name, parameter, train, teacher_shapes)
    ]
    if not names:
        why = {
            "new": "the teacher has all parameters, with equal names and shapes",
            "attention": "the model has no attention modules",
        }.get(train, "the model has no parameters")
        raise SurgeryError(f"no parameters to train: {why}; choose another `train`")
    selection = set(names)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in selection)
    return names


def add_adapters(model: nn.Module, rank: int, alpha: float, modules: Sequence[str] = ()) -> nn.Module:
    """Add LoRA adapters (Hu et al., arXiv:2106.09685) to linear modules in place with PEFT; only the adapters train.

    `modules` are names with * and ?; empty for all linear modules of attention. Returns the PEFT model around it, which
    saves and merges adapters. Raises SurgeryError: peft is not installed, or no linear module matches.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise SurgeryError("lora needs peft: pip install peft") from None
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for pattern in modules:
        if not any(named(pattern, name) for name in linear):
            raise SurgeryError(
                f"lora_modules: no linear module matches {pattern!r}; {examples(linear)}", setting="lora_modules"
            )
    targets = [
        name for name in linear if (any(named(pattern, name) for pattern in modules) if modules else in_attention(name))
    ]
    if not targets:
        raise SurgeryError("no parameters to train: attention has no linear modules; add names to lora_modules")
    # A list of names would also match names that end in them; a regular expression matches whole names.
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules="|".join(map(re.escape, targets))))


def in_attention(name: str) -> bool:
    """Return whether a module or parameter of this name belongs to a decoder layer's attention."""
    return any(part in ATTENTION for part in name.split("."))


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """Build AdamW's groups of trainable parameters: matrices with weight decay, vectors (norms, biases) without."""
    training = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [each for each in training if each.ndim >= 2], "weight_decay": weight_decay},
        {"params": [each for each in training if each.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _chosen(name: str, parameter: Tensor, train: str, teacher: Mapping[str, Sequence[int]] | None) -> bool:
    if train == "all":
        return True
    if train == "attention":
        return in_attention(name)
    return list((teacher or {}).get(name, ())) != list(parameter.shape)


def examples(names: Iterable[str]) -> str:
    """Format the first names of a list as a hint for an error message."""
    samples = list(names)[:3]
    return f"there are {', '.join(samples)}..." if samples else "there are none"
