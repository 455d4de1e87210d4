"""LoRA targets in a checkpoint's attention, for the report and the model card.

PEFT wraps linear modules (`target_modules`), and parameters of modules that are called with one input
(`target_parameters`). It silently skips names without a match, so the usual list q_proj, k_proj, v_proj, o_proj
covers less of a converted model than of its source.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from surgery.common.human import in_code

USUAL = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Usual `target_modules` of LoRA recipes."""
_OF_ATTENTION = re.compile(r"model\.layers\.(\d+)\.self_attn\.(.+)")
_OF_A_CALLED_MODULE = re.compile(r"(?:key|value)_up\.\d+")


def adapter_targets(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Group the matrices of the attention layers, by tensor shapes, by how LoRA can target them.

    `layers`: number of layers with attention. `modules` and `parameters`: names for PEFT, with the number of layers
    that have each. `without`: names of matrices that PEFT cannot adapt.
    """
    layers, modules, parameters, without = set(), Counter(), Counter(), set()
    for name, shape in shapes.items():
        if not (match := _OF_ATTENTION.fullmatch(name)):
            continue
        layers.add(match[1])
        part = match[2]
        if len(shape) < 2:
            continue
        if part.endswith(".weight"):
            modules[part.removesuffix(".weight")] += 1
        elif _OF_A_CALLED_MODULE.fullmatch(part):
            parameters[part] += 1
        else:
            without.add(part)
    return {
        "layers": len(layers),
        "modules": dict(sorted(modules.items())),
        "parameters": dict(sorted(parameters.items())),
        "without": sorted(without),
    }


def adapters_section(targets: dict[str, Any] | None) -> str:
    """Render the model card's section on LoRA; empty for old reports and models without target modules."""
    if not targets or not targets["modules"]:
        return ""
    lines = [f"- `target_modules`: {_listed(targets['modules'], targets['layers'])}"]
    if targets["parameters"]:
        lines.append(f"- `target_parameters`: {_listed(targets['parameters'], targets['layers'])}")
    if missing := [name for name in USUAL if name not in targets["modules"]]:
        lines.append(f"- Not in this model: {_listed(missing)}. PEFT ignores such names without a warning.")
    if targets["without"]:
        lines.append(
            f"- Without adapters: {_listed(targets['without'])}. `surgery heal --train attention` trains them."
        )
    return "\n".join(["## LoRA\n", "Names in the attention that PEFT adapts:\n", *lines]) + "\n\n"


def _listed(names: Mapping[str, int] | list[str], layers: int = 0) -> str:
    """Format names as code, with the number of layers of names that are not in all layers."""
    counts = names if isinstance(names, Mapping) else dict.fromkeys(names, layers)
    partly = {name: f" ({count} of {layers} layers)" if count < layers else "" for name, count in counts.items()}
    return ", ".join(f"`{in_code(name)}`{remark}" for name, remark in partly.items())
