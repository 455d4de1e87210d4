"""How a low-rank conversion spends its budget: the blocks of latents of every layer, before any is converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from surgery.calibration.held_out import HeldOut
from surgery.calibration.library import StatisticsLibrary
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.families.anatomy import AttentionAnatomy
from surgery.model.quantized_cache import Spans
from surgery.running.source import Source
from surgery.structures.kept_layers import converted_layers
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.transforms.allocation import greedy, water_fill
from surgery.transforms.bit_allocation import allocate_bits
from surgery.transforms.low_rank import LowRankConversion, low_rank_layer
from surgery.transforms.low_rank_layer import Block, SimulatedLowRank
from surgery.transforms.low_rank_methods import METHODS, blocks_for, fisher_information, palu_ranks

Blocks = tuple[Block, ...]


def wanted_rank(settings: LowRankSettings, anatomy: AttentionAnatomy) -> int:
    """Numbers per token and layer on average: as many as were asked for, or what the ratio allows.

    Raises:
        SurgeryError: that many, or that few, are impossible.
    """
    full, ratio = anatomy.kv_width, 0.25 if settings.kv_ratio is None else settings.kv_ratio
    rank = settings.rank or int(ratio * full + 1e-9)
    rank -= rank % settings.rank_multiple
    if not 1 <= rank < full:
        raise SurgeryError(
            f"{rank} numbers per token and layer (in multiples of {settings.rank_multiple}): choose fewer than the "
            f"source's {full} and one multiple at least"
        )
    blocks_for(settings.method if settings.method in METHODS else "fisher", anatomy, rank)
    return rank


def plan_ranks(
    opened: Source,
    library: StatisticsLibrary,
    held_out: HeldOut,
    settings: LowRankSettings,
    kept: frozenset[int],
    progress: Progress,
) -> tuple[Blocks, ...]:
    """The blocks of every layer of a conversion by one of the methods of ``--to lowrank``; none for layers kept.

    Raises:
        SurgeryError: the budget is impossible, or the allocation does not go with the method.
    """
    first = opened.first
    rank, method = wanted_rank(settings, first), settings.method
    layers = converted_layers(kept, opened.layers)
    total, multiple = rank * len(layers), settings.rank_multiple
    if method == "palu":
        information = [fisher_information(opened.anatomy(layer), library.load(layer)[0]) for layer in layers]
        pairs = palu_ranks(information, first, total, multiple)
        found = [blocks_for(method, first, keys + values, key_rank=keys) for keys, values in pairs]
        return _of_all_layers(found, layers, opened.layers)
    uniform = _of_all_layers([blocks_for(method, first, rank, multiple=multiple)] * len(layers), layers, opened.layers)
    comparable = METHODS[method].weighted and library.load(layers[0])[0].tokens > 0
    if settings.allocate == "uniform" or (settings.allocate == "auto" and not comparable):
        return uniform
    if not comparable:
        raise SurgeryError(
            f"--allocate {settings.allocate} compares layers by the loss: it needs method fisher or separate, and text"
        )
    trial = _Trial(opened, library, held_out, uniform, settings)
    spectra = trial.spectra()
    ranks = water_fill(spectra, total, minimum=multiple, multiple=multiple)
    if settings.allocate == "greedy":
        if not held_out.texts:
            raise SurgeryError("--allocate greedy measures losses: it needs held-out text")
        start = [block.rank for blocks in uniform for block in blocks]
        with progress.phase("allocate: measure", None, "plan") as advance:

            def measure(ranks: tuple[int, ...]) -> float:
                advance()
                return trial.loss(ranks)

            ranks, _ = greedy([start, ranks], measure, total, multiple, maximum=[len(s) for s in spectra])
    return trial.with_ranks(ranks)


def plan_bits(
    opened: Source, library: StatisticsLibrary, held_out: HeldOut, settings: LowRankSettings, kept: frozenset[int]
) -> tuple[tuple[Blocks, ...], tuple[Spans, ...]]:
    """The blocks of every layer and the formats of their latents, where bits are chosen with the ranks.

    None for layers kept.

    Raises:
        SurgeryError: the budget is impossible.
    """
    first = opened.first
    layers, blocks = converted_layers(kept, opened.layers), blocks_for(settings.method, first, first.kv_width)
    whole = _of_all_layers([blocks] * len(layers), layers, opened.layers)
    trial = _Trial(opened, library, held_out, whole, settings)
    scale_bits = 8 * first.q.dtype.itemsize
    ratio = 0.25 if settings.kv_ratio is None else settings.kv_ratio
    budget = ratio * first.kv_width * scale_bits * len(layers)
    try:
        codes = allocate_bits(trial.spectra(), budget, settings.group, scale_bits)
    except ValueError as error:
        raise SurgeryError(f"--kv-ratio {ratio}: {error}; raise it") from None
    ranks = [sum(count for _, count in spans) for spans in codes]
    return trial.with_ranks(ranks), _of_all_layers(codes, layers, opened.layers)


def _of_all_layers(found: Sequence[tuple], layers: list[int], count: int) -> tuple:
    """What was found of some layers, at their places among all; nothing for the others."""
    every: list[tuple] = [()] * count
    for layer, each in zip(layers, found, strict=True):
        every[layer] = each
    return tuple(every)


class _Trial:
    """Closed forms of all layers at any ranks; a list of ranks has one for every block of every layer."""

    def __init__(
        self,
        opened: Source,
        library: StatisticsLibrary,
        held_out: HeldOut,
        blocks: tuple[Blocks, ...],
        settings: LowRankSettings,
    ):
        self._opened, self._library, self._held_out = opened, library, held_out
        self._blocks, self._settings = blocks, settings

    def with_ranks(self, ranks: Sequence[int]) -> tuple[Blocks, ...]:
        """The blocks at other ranks."""
        remaining = iter(ranks)
        return tuple(tuple(replace(block, rank=next(remaining)) for block in blocks) for blocks in self._blocks)

    def spectra(self) -> list[Tensor]:
        """Energies of all possible latents of every block."""
        converted = (self._convert(layer, blocks) for layer, blocks in enumerate(self._blocks) if blocks)
        return [energy for layer in converted for energy in layer.energies]

    @torch.no_grad()
    def loss(self, ranks: tuple[int, ...]) -> float:
        """Held-out loss of the closed forms."""
        stream, tokens = self._opened.stream, self._held_out.tokens[: self._held_out.texts]
        hidden = stream.embed(tokens)
        for index, blocks in enumerate(self.with_ranks(ranks)):
            attention = None
            if blocks:
                attention = SimulatedLowRank(self._convert(index, blocks).layer.to(stream.device, stream.dtype))
            with stream.layer(index) as layer:
                stream.run_layer(layer, hidden, self._settings.batch_size, attention)
        return stream.loss(hidden, tokens)

    def _convert(self, layer: int, blocks: Blocks) -> LowRankConversion:
        anatomy = self._opened.anatomy(layer).to(torch.float64)
        return low_rank_layer(anatomy, self._library.load(layer)[0], blocks, self._settings.method)
