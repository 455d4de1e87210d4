"""Plans of an MLA conversion: rotary dimensions and latent rank of each layer within the KV budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from surgery.calibration.held_out import HeldOut
from surgery.calibration.library import StatisticsLibrary
from surgery.common.progress import Progress
from surgery.families.anatomy import AttentionAnatomy
from surgery.running.source import Source
from surgery.structures.kept_layers import converted_layers
from surgery.transforms import mla
from surgery.transforms.allocation import Choice, choose_widths
from surgery.transforms.latent_layer import SimulatedAttention
from surgery.transforms.partial_rope import best_components, choose_components

# Held-out sequences on which plans are compared; differences on the same text converge long before losses do. Three are
# too few: with stock MLA at KV ratio 0.25, SmolLM2-135M would get a split that is 0.030 nats worse on four.
SPLIT_SEQUENCES = 4

ROTATION_WEIGHTS = (0.4, 0.63, 1.0, 1.6)
"""Candidate multipliers of the predicted loss of dropped rotations, relative to that of dropped latents; all are tried.

Both predictions are too low, by different factors. The best weight of SmolLM2-135M was 0.4 at KV ratio 0.5 and 1 at
0.25; of the demo model 0.63, 1 and 1.6 at 0.5, 0.25 and 0.125. 0.25 and 2.5 were never the best.
"""
UNTRIED_WEIGHT = 0.63
ROTATED_CHOICES = 16
"""Number of evenly spaced candidates for the count of rotated components in a layer."""


@dataclass(frozen=True)
class MLAPlan:
    """Parameters of a conversion that are fixed before layers are converted one by one.

    Attributes:
        split: split of every converted layer, unless ``ranks`` overrides it; layers in ``kept`` stay unchanged.
        counts: per layer [d/2], number of components of each frequency that keep RoPE; None if the method fixes them.
        weight: the one of ROTATION_WEIGHTS with which the budget was allocated to layers; None for equal layers.
    """

    method: mla.Method
    split: mla.Split
    counts: tuple[Tensor, ...] | None
    ranks: tuple[int, ...] | None = None
    kept: frozenset[int] = frozenset()
    weight: float | None = None

    def convert(self, anatomy: AttentionAnatomy, library: StatisticsLibrary, layer: int) -> mla.ConvertedLayer:
        """Convert one layer, in float64."""
        statistics, lags = library.load(layer)
        basis = mla.key_basis(self.method, anatomy, statistics, self.split)
        costs = None if self.method.folds else mla.component_costs(self.method, anatomy, statistics, lags)
        counts = None if self.counts is None else self.counts[layer]
        rotated = mla.rotated_components(self.method, basis, costs, counts, self.split)
        rank = self.ranks[layer] if self.ranks else self.split.rank
        return mla.convert_layer(self.method, anatomy, statistics, basis, rotated, rank, lags)

    def all_ranks(self, layers: int) -> tuple[int, ...]:
        """Return the rank of every layer; 0 for unchanged layers."""
        return self.ranks or tuple(0 if layer in self.kept else self.split.rank for layer in range(layers))

    def facts(self) -> dict[str, float]:
        """Return rotary dimensions and rank for the report, averaged over the converted layers if these differ."""
        if self.weight is None:
            return asdict(self.split)
        spread = [layer for layer, rank in enumerate(self.ranks) if rank]
        rotated = sum(2 * int(self.counts[layer].sum()) for layer in spread)
        ranks = sum(self.ranks[layer] for layer in spread)
        return {"rope_dim": rotated / len(spread), "rank": ranks / len(spread), "rotation_weight": self.weight}


@dataclass(frozen=True)
class Planner:
    """Planner of one conversion. Frequencies that keep RoPE are ``free``, chosen by cost, or ``grid``, the highest."""

    method: mla.Method
    opened: Source
    library: StatisticsLibrary
    frequencies: str
    kept: frozenset[int]

    def alike(self, split: mla.Split, *, one_list: bool) -> MLAPlan:
        """Plan the same split for all layers; ``one_list``: they share a list of frequencies, as in a stock config."""
        if self.method.folds:
            return MLAPlan(self.method, split, None, kept=self.kept)
        layers, first = self.opened.layers, self.opened.anatomy(self._converted[0])
        pairs, count = first.head_dim // 2, split.rope_dim // 2
        if self.frequencies == "grid":
            return MLAPlan(self.method, split, (_highest(pairs, count),) * layers, kept=self.kept)
        costs = {}
        for layer in self._converted:
            statistics, lags = self.library.load(layer)
            costs[layer] = mla.component_costs(self.method, first, statistics, lags)
        frequency = torch.arange(pairs).repeat(first.kv_heads)
        if one_list:
            pairs_of_heads = choose_components(list(costs.values()), frequency, pairs, count)
            return MLAPlan(self.method, split, (pairs_of_heads,) * layers, kept=self.kept)
        counts = {layer: choose_components([cost], frequency, pairs, count) for layer, cost in costs.items()}
        return MLAPlan(self.method, split, self._for_all_layers(counts, pairs), kept=self.kept)

    def spread(self, splits: list[mla.Split], progress: Progress) -> list[MLAPlan]:
        """Plan frequencies and a rank for each layer by their predicted loss, within one budget for all layers.

        The method must have lags and gradients. Returns one plan per weight of ROTATION_WEIGHTS, of candidate splits of
        a layer's mean budget. A single split fixes the rotary dimensions, gives a single plan, and lets only ranks
        differ.
        """
        width = splits[0].rope_dim + splits[0].rank
        options: dict[int, list[tuple[Tensor, Choice]]] = {}
        with progress.phase("weigh rotations and latents", len(self._converted)) as advance:
            for layer in self._converted:
                anatomy = self.opened.anatomy(layer).to(torch.float64)
                pairs = anatomy.head_dim // 2
                limit = pairs if self.frequencies == "grid" else min(width // 2, anatomy.kv_heads * pairs)
                sizes = [splits[0].rope_dim // 2]
                if len(splits) > 1:
                    steps = range(ROTATED_CHOICES + 1)
                    sizes = sorted({max(1, round(limit * step / ROTATED_CHOICES)) for step in steps})
                options[layer] = self._options(anatomy, layer, sizes)
                advance()
        plans = []
        for weight in ROTATION_WEIGHTS if len(splits) > 1 else (1.0,):
            choices = [
                [replace(choice, cost=weight * choice.cost) for _, choice in of_layer] for of_layer in options.values()
            ]
            widths = dict(zip(options, choose_widths(choices, width * len(options)), strict=True))
            counts = {layer: options[layer][index][0] for layer, (index, _) in widths.items()}
            ranks = tuple(widths[layer][1] if layer in widths else 0 for layer in range(self.opened.layers))
            plans.append(MLAPlan(self.method, splits[0], self._for_all_layers(counts, pairs), ranks, self.kept, weight))
        return plans

    @property
    def _converted(self) -> list[int]:
        return converted_layers(self.kept, self.opened.layers)

    def _options(self, anatomy: AttentionAnatomy, layer: int, sizes: list[int]) -> list[tuple[Tensor, Choice]]:
        """Return, for each number of rotated components, the counts by frequency and the :class:`Choice`."""
        statistics, lags = self.library.load(layer)
        basis = mla.key_basis(self.method, anatomy, statistics, None)
        turned = mla.rotation_energies(anatomy, statistics, basis, lags)
        pairs, costs = anatomy.head_dim // 2, mla.component_costs(self.method, anatomy, statistics, lags)
        counts = [_highest(pairs, size) for size in sizes]
        if self.frequencies == "free":
            counts = [choose_components([costs], basis.frequency, pairs, size) for size in sizes]
        rotated = [best_components(costs, basis.frequency, each) for each in counts]
        energies = mla.latent_energies(anatomy, statistics, basis, rotated)
        choices = [
            Choice(2 * size, float(turned.sum() - turned[rotating].sum()), energy)
            for size, rotating, energy in zip(sizes, rotated, energies, strict=True)
        ]
        return list(zip(counts, choices, strict=True))

    def _for_all_layers(self, counts: dict[int, Tensor], pairs: int) -> tuple[Tensor, ...]:
        """Return the counts of every layer; zeros for unchanged layers."""
        return tuple(counts.get(layer, _highest(pairs, 0)) for layer in range(self.opened.layers))


def _highest(pairs: int, count: int) -> Tensor:
    """Return the counts [d/2] of a grid: one component at each of the ``count`` highest frequencies."""
    return (torch.arange(pairs) < count).long()


def search_plans(plans: list[MLAPlan], losses_of: Callable[[list[MLAPlan]], list[float]]) -> dict[int, float]:
    """Search for the plan of least held-out loss; return the losses of the tried plans by index.

    The loss is assumed to fall and then rise along the list. The search starts with two plans in the middle and
    continues outwards while the outermost plan is the best. For methods that fold frequencies all plans are tried.
    """
    count = len(plans)
    due = list(range(count)) if plans[0].method.folds else list(range(count))[(count - 1) // 2 :][:2]
    losses: dict[int, float] = {}
    while due:
        measured = losses_of([plans[index] for index in due])
        losses |= zip(due, measured, strict=True)
        best = min(losses, key=losses.__getitem__)
        due = [index for index in (best - 1, best + 1) if 0 <= index < count and index not in losses]
    return losses


def try_plans(
    plans: list[MLAPlan],
    opened: Source,
    library: StatisticsLibrary,
    held_out: HeldOut,
    batch_size: int,
    progress: Progress,
) -> list[float]:
    """Measure the held-out loss of each plan; plans run side by side, so that every layer is loaded once."""
    stream, tokens = opened.stream, held_out.tokens[: min(held_out.texts, SPLIT_SEQUENCES)]
    hidden = [stream.embed(tokens) for _ in plans]
    with progress.phase("try splits of the budget", stream.num_layers * len(plans), "layer") as advance:
        for index in range(stream.num_layers):
            anatomy = None
            if any(index not in plan.kept for plan in plans):
                anatomy = opened.anatomy(index).to(torch.float64)
            with stream.layer(index) as layer:
                for plan, states in zip(plans, hidden, strict=True):
                    attention = None
                    if index not in plan.kept:
                        converted = plan.convert(anatomy, library, index).truncated
                        attention = SimulatedAttention(converted.to(stream.device, stream.dtype))
                    stream.run_layer(layer, states, batch_size, attention)
                    advance()
    return [stream.loss(states, tokens) for states in hidden]
