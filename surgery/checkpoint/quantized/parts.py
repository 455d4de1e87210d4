"""Helpers shared by the readers of quantized formats."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.checkpoint.dequantized_store import Matrix
from surgery.checkpoint.stores import Store
from surgery.checkpoint.tensors import TensorInfo, describe
from surgery.common.errors import SurgeryError

WEIGHT = "weight"


@dataclass(frozen=True)
class Quantization:
    """Quantization of a checkpoint: display name, and matrices by their names in an unquantized one."""

    name: str
    matrices: dict[str, Matrix]


def modules(store: Store, part: str) -> list[str]:
    """List the modules that have a tensor named ``part``, each with its final dot."""
    return [name.removesuffix(part) for name in store.infos if name.endswith("." + part)]


def required_info(module: str, part: str, store: Store) -> TensorInfo:
    """Return the info of a required tensor of a module. Raises SurgeryError: the tensor is missing."""
    if module + part not in store.infos:
        raise SurgeryError(f"{module}{part}: missing, but required by quantization_config; download it again")
    return store.infos[module + part]


def misfit(name: str, codes: TensorInfo, companion: TensorInfo, called: str = "scales") -> SurgeryError:
    """Build the error for codes whose shape or dtype does not match their scales (or other companion tensor)."""
    return SurgeryError(f"{name}: {describe(codes)} does not fit its {called}, {describe(companion)}")
