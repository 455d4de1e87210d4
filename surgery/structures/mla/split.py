"""Chooses how the KV budget of an MLA conversion is split, by trying the candidates on held-out text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surgery.calibration.held_out import HeldOut
from surgery.calibration.library import StatisticsLibrary
from surgery.common.progress import Progress
from surgery.families.anatomy import AttentionAnatomy
from surgery.running.layer_stream import LayerStream
from surgery.structures.kept_layers import converted_layers
from surgery.transforms import mla
from surgery.transforms.allocation import water_fill
from surgery.transforms.latent_layer import SimulatedAttention
from surgery.transforms.partial_rope import choose_components

# Held-out sequences that splits are compared on: differences on the same text settle long before losses do.
SPLIT_SEQUENCES = 4


@dataclass(frozen=True)
class MLAPlan:
    """Everything that has to be settled before layers can be converted one by one."""

    method: mla.Method
    split: mla.Split
    counts: Tensor | None  # [d/2] components of each frequency that keep RoPE; None where the method's order decides
    ranks: tuple[int, ...] | None = None  # per layer; None: the split's in all
    kept: frozenset[int] = frozenset()  # layers that stay as they are

    def convert(self, anatomy: AttentionAnatomy, library: StatisticsLibrary, layer: int) -> mla.ConvertedLayer:
        """Converts one layer (float64)."""
        statistics, lags = library.load(layer)
        basis = mla.key_basis(self.method, anatomy, statistics, self.split)
        costs = None if self.method.folds else mla.component_costs(self.method, anatomy, statistics, lags)
        rotated = mla.rotated_components(self.method, basis, costs, self.counts, self.split)
        rank = self.ranks[layer] if self.ranks else self.split.rank
        return mla.convert_layer(self.method, anatomy, statistics, basis, rotated, rank, lags)

    def with_ranks_by_spectrum(
        self, anatomy_of: Callable[[int], AttentionAnatomy], library: StatisticsLibrary, layers: int, progress: Progress
    ) -> MLAPlan:
        """The same plan with the same bytes in all, each layer's rank by the energies of its latent."""
        spectra = {}
        with progress.phase("allocate ranks", layers) as advance:
            for layer in converted_layers(self.kept, layers):
                spectra[layer] = self.convert(anatomy_of(layer).to(torch.float64), library, layer).energy
                advance()
        ranks = water_fill(list(spectra.values()), len(spectra) * self.split.rank)
        found = dict(zip(spectra, ranks, strict=True))
        return replace(self, ranks=tuple(found.get(layer, 0) for layer in range(layers)))

    def all_ranks(self, layers: int) -> tuple[int, ...]:
        """Of every layer; 0 for those that are kept."""
        return self.ranks or tuple(0 if layer in self.kept else self.split.rank for layer in range(layers))


def plan_for(
    split: mla.Split,
    method: mla.Method,
    anatomy_of: Callable[[int], AttentionAnatomy],
    library: StatisticsLibrary,
    layers: int,
    frequencies: str,
    kept: frozenset[int],
) -> MLAPlan:
    """Fixes the model's list of frequencies for a split: ``free`` by cost over all layers, ``grid`` the highest.

    Args:
        kept: layers that stay as they are, and cost nothing.
    """
    if method.folds:
        return MLAPlan(method, split, None, kept=kept)
    converted = converted_layers(kept, layers)
    first = anatomy_of(converted[0])
    pairs, count = first.head_dim // 2, split.rope_dim // 2
    if frequencies == "grid":
        return MLAPlan(method, split, (torch.arange(pairs) < count).long(), kept=kept)
    costs = []
    for layer in converted:
        statistics, lags = library.load(layer)
        costs.append(mla.component_costs(method, first, statistics, lags))
    frequency = torch.arange(pairs).repeat(first.kv_heads)
    return MLAPlan(method, split, choose_components(costs, frequency, pairs, count), kept=kept)


def try_plans(
    plans: list[MLAPlan],
    stream: LayerStream,
    anatomy_of: Callable[[int], AttentionAnatomy],
    library: StatisticsLibrary,
    held_out: HeldOut,
    batch_size: int,
    progress: Progress,
) -> list[float]:
    """Held-out loss of every plan, all carried through the layers together so that each layer is loaded once."""
    tokens = held_out.tokens[: min(held_out.texts, SPLIT_SEQUENCES)]
    hidden = [stream.embed(tokens) for _ in plans]
    with progress.phase("try splits of the budget", stream.num_layers * len(plans), "layer") as advance:
        for index in range(stream.num_layers):
            anatomy = None
            if any(index not in plan.kept for plan in plans):
                anatomy = anatomy_of(index).to(torch.float64)
            with stream.layer(index) as layer:
                for plan, states in zip(plans, hidden, strict=True):
                    attention = None
                    if index not in plan.kept:
                        converted = plan.convert(anatomy, library, index).truncated
                        attention = SimulatedAttention(converted.to(stream.device, stream.dtype))
                    stream.run_layer(layer, states, batch_size, attention)
                    advance()
    return [stream.loss(states, tokens) for states in hidden]
