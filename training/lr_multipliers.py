"""Learning-rate multipliers of the rows and columns of parameters.

A checkpoint format may require that an element stays constant, or that rows of a weight are very small or large. One
step of Adam, of the learning rate's magnitude, would undo that. A factor f reparametrizes an element w as f·v and
trains v: the gradient is multiplied by f before it is clipped, and the optimizer's update by f. With f = 0 the element
stays bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from surgery.common.errors import SurgeryError


class Factors(NamedTuple):
    """Factors of a parameter's elements: those of its rows (first dimension) times those of its columns (last).

    Both are fp32 vectors, or scalars that hold for all.
    """

    rows: Tensor
    columns: Tensor

    def dense(self, parameter: Tensor) -> Tensor:
        """Return the factors of all elements, fp32 of the parameter's shape."""
        rows = self.rows.view(-1, *[1] * (parameter.ndim - 1))
        return torch.ones(parameter.shape) * rows * self.columns


def factors_of(rules: Mapping[str, Any], model: nn.Module, where: str) -> dict[str, Factors]:
    """Build factors by parameter name from JSON values: numbers, or lists of them, under `rows` and `columns`.

        {"model.layers.0.self_attn.kv_a_layernorm.weight": {"rows": 0}, ...}

    `where` names the rules in errors. Raises SurgeryError: a parameter does not exist or has another shape.
    """
    parameters, factors = dict(model.named_parameters()), {}
    for name, rule in rules.items():
        try:
            sides = (torch.tensor(rule.get(side, 1.0), dtype=torch.float32) for side in ("rows", "columns"))
            factors[name] = Factors(*sides)
            fits = factors[name].dense(parameters[name]).shape == parameters[name].shape
        except (KeyError, AttributeError, TypeError, ValueError, RuntimeError):
            fits = False
        if not fits:
            raise SurgeryError(
                f"{where}: {name}: must be a parameter, with numbers or lists of its size under rows and columns"
            )
    return factors


def adapter_factors(factors: Mapping[str, Factors], model: nn.Module) -> dict[str, Tensor]:
    """Translate factors of weights to dense factors of their LoRA adapters, by name.

    The update of a weight [out, in] is B A. Row factors go to the rows of B, column factors to the columns of A, whose
    initial value is multiplied in place, too.
    """
    translated: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        module, part, _ = name.partition(".lora_A.")
        if not part or f"{module}.weight" not in factors:
            continue
        rows, columns = factors[f"{module}.weight"]
        if not bool((columns == 1).all()):
            translated[name] = columns.expand(parameter.shape).clone()
            with torch.no_grad():
                parameter.mul_(columns.to(parameter))
        other = name.replace(".lora_A.", ".lora_B.")
        shape = model.get_parameter(other).shape
        translated[other] = rows.view(-1, 1).expand(shape).clone()
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


def _sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
