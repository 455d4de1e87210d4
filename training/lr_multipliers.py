"""Per-parameter learning-rate multipliers, by element of a tensor.

A checkpoint format may require that an element stays constant, or that rows of a weight are very small or large. One
step of Adam, of the learning rate's magnitude, would undo that. A factor f reparametrizes an element w as f·v and
trains v: the gradient is multiplied by f before it is clipped, and the optimizer's update by f. With f = 0 the element
stays bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.checkpoint.disk import read_json
from surgery.common.errors import SurgeryError
from surgery.training.settings import named
from surgery.training.trainable import examples


def read_factors(path: str | Path, model: nn.Module) -> dict[str, Tensor]:
    """Read factors from a JSON file of rules; see `factors_of`.

    Raises SurgeryError: the file cannot be read, or a rule is invalid.
    """
    return factors_of(read_json(Path(path)), model, str(path))


def factors_of(rules: Mapping[str, Any], model: nn.Module, where: str) -> dict[str, Tensor]:
    """Build fp32 factors of parameters' shapes from rules by parameter name, or by a pattern with * and ?.

    A rule is `true` (all is frozen); a list of indices along the first dimension, or a range like "0:512" (these rows
    are frozen); or an object with `rows` or `columns` (along the last dimension), and `factor` (default 0):

        {"*.kv_a_proj_with_mqa.weight": {"rows": "0:512", "factor": 9.3e-10}, "*.kv_b_proj.weight": {"columns": [512]}}

    A list of objects holds several rules for a parameter; later rules win. `where` names the rules in errors. Raises
    SurgeryError: a rule is malformed, or matches no parameter or index.
    """
    parameters = dict(model.named_parameters())
    factors: dict[str, Tensor] = {}
    for pattern, entry in rules.items():
        names = [name for name in parameters if named(pattern, name)]
        if not names:
            raise SurgeryError(f"{where}: no parameter matches {pattern!r}; {examples(parameters)}")
        several = isinstance(entry, list) and entry and all(isinstance(rule, dict) for rule in entry)
        for rule in entry if several else [entry]:
            entries, along, factor = _rule(rule, f"{where}: {pattern!r}")
            for name in names:
                tensor = factors.setdefault(name, torch.ones(parameters[name].shape))
                tensor.transpose(0, along)[_index(entries, tensor, along, f"{where}: {pattern!r}")] = factor
    return factors


def adapter_factors(factors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Translate factors of weights to factors of their LoRA adapters.

    The update of a weight [out, in] is B A. Row factors go to the rows of B, column factors to the columns of A, whose
    initial value is multiplied in place, too. Raises SurgeryError: factors are not an outer product of row and column
    factors.
    """
    translated: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        module, part, _ = name.partition(".lora_A.")
        factor = factors.get(f"{module}.weight") if part else None
        if factor is None:
            continue
        factor = factor.flatten(1)
        columns = factor.amax(0) / factor.amax().clamp_min(torch.finfo(factor.dtype).tiny)
        rows = factor.amax(1)
        if not torch.equal(factor, rows[:, None] * columns):
            raise SurgeryError(
                f"{module}.weight: with LoRA, factors must cover whole rows or columns, not single elements"
            )
        if not bool((columns == 1).all()):
            translated[name] = columns.expand(parameter.shape).clone()
            with torch.no_grad():
                parameter.mul_(columns.to(parameter))
        other = name.replace(".lora_A.", ".lora_B.")
        translated[other] = rows[:, None].expand(model.get_parameter(other).shape).clone()
    return translated


class LRMultipliers:
    """Factors applied to gradients and updates around each optimizer step; under FSDP2 to each process's shards."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], factors: Mapping[str, Tensor]) -> None:
        """Match fp32 factors of unsharded shapes to trainable parameters by name, after the model was sharded.

        Raises SurgeryError: factors and parameter differ in shape, or every trainable element has the factor 0.
        """
        self._entries: list[tuple[nn.Parameter, Tensor]] = []
        self._before: list[Tensor] = []
        moving = 0
        for name, parameter in parameters:
            if not parameter.requires_grad:
                continue
            factor = factors.get(name)
            if factor is None:
                moving += parameter.numel()
                continue
            if factor.shape != parameter.shape:
                raise SurgeryError(
                    f"{name}: factors have shape {list(factor.shape)}, the parameter {list(parameter.shape)}"
                )
            moving += int((factor != 0).sum())
            self._entries.append((parameter, _local(_sharded_like(factor.to(parameter.device), parameter))))
        if not moving:
            raise SurgeryError("no trainable parameters: every element has the factor 0; remove or raise some factors")

    def __len__(self) -> int:
        """Return the number of parameters that have factors."""
        return len(self._entries)

    @torch.no_grad()
    def before_step(self) -> None:
        """Multiply the gradients, before clipping, and save the parameters' values."""
        for parameter, factors in self._entries:
            if parameter.grad is not None:
                gradient = _local(parameter.grad)
                # `where`, since 0 times nan or infinity is nan.
                gradient.copy_(torch.where(factors == 0, 0, gradient * factors))
        self._before = [_local(parameter).detach().clone() for parameter, _ in self._entries]

    @torch.no_grad()
    def after_step(self) -> None:
        """Multiply the optimizer's update, which includes momentum and weight decay."""
        for (parameter, factors), before in zip(self._entries, self._before, strict=True):
            after = _local(parameter)
            after.copy_(
                torch.where(factors == 0, before, torch.where(factors == 1, after, before + factors * (after - before)))
            )
        self._before = []


def _rule(rule: Any, where: str) -> tuple[Any, int, float]:
    """Parse a rule to its indices, the dimension that they index, and the factor."""
    if not isinstance(rule, dict):
        return rule, 0, 0.0
    factor, axes = rule.get("factor", 0.0), {"rows", "columns"} & set(rule)
    if (
        len(axes) > 1
        or set(rule) - axes - {"factor"}
        or isinstance(factor, bool)
        or not isinstance(factor, int | float)
    ):
        raise SurgeryError(f"{where}: a rule takes `rows` or `columns` and a number `factor`, not {rule!r}")
    if not 0 <= factor < math.inf:
        raise SurgeryError(f"{where}: factor must be a finite number >= 0, not {factor!r}")
    return next((rule[axis] for axis in axes), True), -1 if "columns" in axes else 0, float(factor)


def _index(rows: Any, tensor: Tensor, along: int, where: str) -> Any:
    """Convert the indices of a rule to an index along a dimension."""
    if rows is True:
        return ...
    size = tensor.shape[along] if tensor.ndim else 0
    if isinstance(rows, str):
        start, colon, stop = rows.partition(":")
        if colon and start.isdigit() and stop.isdigit() and int(start) < int(stop) <= size:
            return slice(int(start), int(stop))
    elif isinstance(rows, list) and all(type(row) is int and -size <= row < size for row in rows):
        return torch.tensor(rows, dtype=torch.long)
    raise SurgeryError(f'{where}: indices must be true, a list or a range such as "0:8", below {size}; not {rows!r}')


def _sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
