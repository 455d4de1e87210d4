"""Selection of the layers that a conversion leaves unchanged, with the tensors and caches of the source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.setting import setting

AUTO, NONE = "auto", "none"


def keep_layers() -> Any:
    """Create the setting ``keep_layers``, for targets that can leave layers unchanged."""
    return setting(
        AUTO,
        "Layers to leave unchanged: indices (negative ones count from the end), auto or none.",
        more="auto: sliding-window layers of models that also have full attention; their caches do not grow. "
        "Linear-attention layers are never converted. A ratio refers to the converted layers.",
        metavar="N,N|auto|none",
        section="Budget",
        advanced=True,
    )


def kept_layers(spec: str, windows: Sequence[int | None], stateful: frozenset[int] = frozenset()) -> frozenset[int]:
    """Return the unchanged layers: those of the setting ``spec``, given every layer's window, and ``stateful`` ones.

    Raises SurgeryError: ``spec`` names a layer that the model does not have, or all layers.
    """
    layers = len(windows)
    if spec in (AUTO, NONE):
        differ = spec == AUTO and None in windows
        return stateful.union(layer for layer, window in enumerate(windows) if differ and window is not None)
    try:
        numbers = [int(part) for part in str(spec).split(",")]
    except ValueError:
        raise SurgeryError(
            f"keep_layers {spec}: must be layer indices such as 0,1,-1, or {AUTO} or {NONE}", setting="keep_layers"
        ) from None
    if wrong := [number for number in numbers if not -layers <= number < layers]:
        raise SurgeryError(f"keep_layers {wrong[0]}: the model has layers 0 to {layers - 1}", setting="keep_layers")
    unchanged = stateful.union(number % layers for number in numbers)
    if len(unchanged) == layers:
        raise SurgeryError(
            f"keep_layers {spec}: all layers are kept; leave at least one to convert", setting="keep_layers"
        )
    return unchanged


def converted_layers(unchanged: frozenset[int], layers: int) -> list[int]:
    """Return the layers to convert, in order."""
    return [layer for layer in range(layers) if layer not in unchanged]
