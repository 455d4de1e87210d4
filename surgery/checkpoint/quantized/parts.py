"""Parts that the readers of quantized formats share: a matrix's tensors, and checks of them."""

from __future__ import annotations

from dataclasses import dataclass

from surgery.checkpoint.dequantized_store import Matrix
from surgery.checkpoint.stores import Store
from surgery.checkpoint.tensors import TensorInfo, describe
from surgery.common.errors import SurgeryError

WEIGHT = "weight"


@dataclass(frozen=True)
class Quantization:
    """Quantization of a checkpoint.

    Attributes:
        name: of the codes, for people.
        matrices: by the names that they have in an unquantized checkpoint.
    """

    name: str
    matrices: dict[str, Matrix]


def modules(store: Store, part: str) -> list[str]:
    """Names of the modules that have a tensor of that name, each with its last dot."""
    return [name.removesuffix(part) for name in store.infos if name.endswith("." + part)]


def beside(module: str, part: str, store: Store) -> TensorInfo:
    """A tensor that a module must have.

    Raises:
        SurgeryError: it has none.
    """
    if module + part not in store.infos:
        raise SurgeryError(f"{module}{part}: missing from the checkpoint, whose config says how it is quantized")
    return store.infos[module + part]


def misfit(name: str, codes: TensorInfo, beside: TensorInfo, called: str = "scales") -> SurgeryError:
    """Codes and scales, or what else stands next to them, of sizes or dtypes that do not belong together."""
    return SurgeryError(f"{name}: {describe(codes)} does not fit its {called}, {describe(beside)}")
