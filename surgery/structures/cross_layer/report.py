"""Report of a group and its bytes, for conversions to a cache that layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surgery.architectures.cross_layer import REASON
from surgery.architectures.own_class import MODEL_TYPE
from surgery.common.human import short
from surgery.structures.cross_layer.settings import CrossLayerSettings


def cross_layer_target(settings: CrossLayerSettings, groups: Sequence[tuple[int, int]], ranks: Any) -> dict[str, Any]:
    """Return the target of a report."""
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
"""The stage of the report after the source."""


@dataclass(frozen=True)
class GroupReport:
    """One group of layers in the report.

    Attributes:
        layer: the group's first and last.
        ranks: numbers that the group keeps of a token that is no longer exact; for merged pairs direction and norms.
        shared_rank: of those, what other groups read: none.
        key_error, value_error: share of the keys', and of the values', energy on held-out text that is not rebuilt.
        error: predicted share of the energy that is lost in the metric of the loss, see
            :class:`surgery.transforms.cross_layer.SharedBasis`; None where nothing predicts it.
        measured: relative error of what the group adds to the hidden states, on the source's inputs, by stage.
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
        """Heads of :meth:`cells`."""
        return "latents", "read too", "keys, not rebuilt", "values, not rebuilt"

    def cells(self) -> tuple:
        """Return the values of the row, for people."""
        return " + ".join(map(str, self.ranks)), self.shared_rank, short(self.key_error), short(self.value_error)
