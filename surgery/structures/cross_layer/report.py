"""Report entries of cross-layer conversions: the target and its groups of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surgery.architectures.cross_layer import REASON
from surgery.architectures.custom_class import MODEL_TYPE
from surgery.common.human import short
from surgery.structures.cross_layer.settings import CrossLayerSettings


def cross_layer_target(settings: CrossLayerSettings, groups: Sequence[tuple[int, int]], ranks: Any) -> dict[str, Any]:
    """Build the report's entry of the target."""
    return {
        "to": "crosslayer",
        "method": settings.method,
        "model_type": MODEL_TYPE,
        "reasons": [REASON],
        "groups": [list(span) for span in groups],
        "ranks": ranks,
        "sinks": settings.sinks,
        "window": settings.window,
        "block": settings.block,
    }


SHARED = "shared"
"""Name of the stage after the source in the report."""


@dataclass(frozen=True)
class GroupReport:
    """Report of one group of layers.

    Attributes:
        layer: first and last layer of the group, "first-last".
        ranks: elements per token that the group caches for tokens outside the full-precision ones; for merged pairs
            the direction and the norms.
        shared_rank: elements that other groups read; 0.
        key_error, value_error: relative squared error of rebuilt keys and values on held-out text.
        error: predicted relative error in the metric of the loss, see
            :class:`surgery.transforms.cross_layer.SharedBasis`; None if there is no prediction.
        measured: relative error of the group's contribution to the hidden states, on the source's inputs, by stage.
    """

    layer: str
    ranks: tuple[int, ...]
    shared_rank: int
    key_error: float
    value_error: float
    error: float | None
    measured: dict[str, float]

    @staticmethod
    def columns() -> tuple[str, ...]:
        """Return the column heads of :meth:`cells`."""
        return "latents", "read too", "keys, not rebuilt", "values, not rebuilt"

    def cells(self) -> tuple:
        """Return the values of the group's row in the printed table."""
        return " + ".join(map(str, self.ranks)), self.shared_rank, short(self.key_error), short(self.value_error)
