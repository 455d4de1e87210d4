"""Plan of heads from scores and a byte budget: which stay full, which stream, which stream with a compensation token.

What can stream is a *unit*: KV heads of one layer that share what they cache. Of plain attention every KV head is one;
heads that are rebuilt from one latent are one together, since the latent of a token goes only if nobody reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import BoolTensor, Tensor

from surgery.common.errors import SurgeryError

Units = Sequence[Sequence[tuple[int, ...]]]
"""Units of every layer, each the KV heads that are in it."""


@dataclass(frozen=True)
class HeadPlan:
    """Plan of every KV head.

    Attributes:
        full: bool [L, G], heads that keep their whole context; all others stream.
        compensated: bool [L, G], streaming heads that read the mean of what they dropped (RazorAttention).
        sinks, recent: tokens that a streaming head keeps: the first, and the last with the query's own among them.
    """

    full: BoolTensor
    compensated: BoolTensor
    sinks: int
    recent: int

    def __post_init__(self) -> None:
        if self.full.shape != self.compensated.shape or (self.full & self.compensated).any():
            raise SurgeryError("a plan's compensated heads are those of its streaming ones")

    @property
    def streams(self) -> BoolTensor:
        """[L, G], heads that keep sinks and recent tokens only."""
        return ~self.full

    def order(self, layer: int) -> list[int]:
        """A layer's KV heads in the order of a hybrid checkpoint: full, streaming, compensated; each as they came."""
        kind = self.streams[layer].int() + self.compensated[layer].int()
        return sorted(range(len(kind)), key=lambda head: (int(kind[head]), head))


def unit_ranking(scores: Tensor, units: Units) -> list[tuple[int, int]]:
    """(layer, unit) in the order in which they deserve to stay full: a unit is worth what its best head is.

    Equal scores go by layer and place, so that a plan is the same every time; patterns with many ties say little.
    """
    worth = {
        (layer, number): max(float(scores[layer, head]) for head in heads)
        for layer, layer_units in enumerate(units)
        for number, heads in enumerate(layer_units)
    }
    return sorted(worth, key=lambda place: (-worth[place], place))


def compile_plan(
    scores: Tensor,
    units: Units,
    affordable: Callable[[BoolTensor], bool],
    sinks: int,
    recent: int,
    *,
    multiple: int = 1,
    compensated: float = 0.0,
) -> HeadPlan:
    """Keeps full as many of the best units as a budget affords.

    Args:
        scores: [L, G]; higher scores need their context more.
        units: what can stream.
        affordable: whether a plan with these full heads [L, G] is within the budget; with more full heads it must not
            become so again.
        multiple: every layer's full heads, and so its streaming ones, are a multiple of this, for tensor parallelism
            over as many devices. Needs units of one head.
        compensated: share of the streaming heads, the best of them, that get a compensation token.

    Raises:
        SurgeryError: not even all heads streaming is within the budget, or `multiple` does not divide the heads.
    """
    full = torch.zeros(scores.shape, dtype=torch.bool)
    if not affordable(full):
        raise SurgeryError(
            f"the budget is less than {sinks} sinks and {recent} recent tokens of all heads take: raise --kv-ratio, "
            "lower --sinks and --window, or count the ratio at a longer --context"
        )
    for place in _in_bundles(scores, units, multiple):
        more = full.clone()
        for layer, heads in place:
            more[layer, list(heads)] = True
        if not affordable(more):
            break
        full = more
    streaming = [(layer, heads) for layer, whole in enumerate(units) for heads in whole if not full[layer, heads[0]]]
    compensated_heads = torch.zeros_like(full)
    if compensated:
        streaming.sort(key=lambda unit: (-max(float(scores[unit[0], head]) for head in unit[1]), unit))
        for layer, heads in streaming[: round(compensated * len(streaming))]:
            compensated_heads[layer, list(heads)] = True
    return HeadPlan(full, compensated_heads, sinks, recent)


def _in_bundles(scores: Tensor, units: Units, multiple: int) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Units that become full together, best first; a bundle of several heads is worth their mean."""
    if multiple == 1:
        return [[(layer, units[layer][number])] for layer, number in unit_ranking(scores, units)]
    bundles = []
    for layer, layer_units in enumerate(units):
        if any(len(heads) > 1 for heads in layer_units):
            raise SurgeryError("--heads-multiple: heads that share a latent stream together, leave it out")
        if len(layer_units) % multiple:
            raise SurgeryError(
                f"--heads-multiple {multiple} does not divide the {len(layer_units)} KV heads of layer {layer}"
            )
        ranked = [(float(scores[layer, heads[0]]), heads) for heads in layer_units]
        ranked.sort(key=lambda pair: (-pair[0], pair[1]))
        for start in range(0, len(ranked), multiple):
            part = ranked[start : start + multiple]
            worth = sum(score for score, _ in part) / multiple
            bundles.append((-worth, layer, start, [(layer, heads) for _, heads in part]))
    return [bundle for *_, bundle in sorted(bundles, key=lambda entry: entry[:3])]
