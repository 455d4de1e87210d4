"""Plan of full and streaming heads, from scores and a byte budget.

A *unit* streams as a whole: KV heads of one layer that share cached elements. In plain attention every KV head is a
unit. Heads that read the same latent are one unit, since a latent is evicted only if no head reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import BoolTensor, Tensor

from surgery.common.errors import SurgeryError

Units = Sequence[Sequence[tuple[int, ...]]]
"""Units of each layer, each a tuple of KV heads."""


@dataclass(frozen=True)
class HeadPlan:
    """Plan of all KV heads.

    Attributes:
        full: bool [L, G], heads that keep their whole context; all others stream.
        sinks, recent: first and last tokens that a streaming head keeps, the query's own included.
    """

    full: BoolTensor
    sinks: int
    recent: int

    @property
    def streams(self) -> BoolTensor:
        """Streaming heads [L, G], which keep sinks and recent tokens only."""
        return ~self.full

    def order(self, layer: int) -> list[int]:
        """Return a layer's KV heads in the order of a hybrid checkpoint: full heads first."""
        streams = self.streams[layer].tolist()
        return sorted(range(len(streams)), key=lambda head: (streams[head], head))


def unit_ranking(scores: Tensor, units: Units) -> list[tuple[int, int]]:
    """Rank units as (layer, unit), highest score first; a unit has the score of its best head.

    Ties are ordered by layer and index, so that plans are deterministic; patterns with many ties mean little.
    """
    worth = {
        (layer, number): max(float(scores[layer, head]) for head in heads)
        for layer, layer_units in enumerate(units)
        for number, heads in enumerate(layer_units)
    }
    return sorted(worth, key=lambda unit: (-worth[unit], unit))


def compile_plan(
    scores: Tensor,
    units: Units,
    affordable: Callable[[BoolTensor], bool],
    sinks: int,
    recent: int,
) -> HeadPlan:
    """Compile a plan that keeps as many of the best units full as fit the budget.

    Args:
        scores: [L, G]; heads with higher scores need their context more.
        units: units of heads that can stream.
        affordable: returns whether a plan with these full heads [L, G] fits the budget; must be monotonic.

    Raises:
        SurgeryError: the budget is too small with all heads streaming.
    """
    full = torch.zeros(scores.shape, dtype=torch.bool)
    if not affordable(full):
        raise SurgeryError(
            f"the budget is less than {sinks} sinks and {recent} recent tokens of all heads: raise --kv-ratio, lower "
            "--sinks and --window, or raise --context"
        )
    for layer, number in unit_ranking(scores, units):
        more = full.clone()
        more[layer, list(units[layer][number])] = True
        if not affordable(more):
            break
        full = more
    return HeadPlan(full, sinks, recent)
