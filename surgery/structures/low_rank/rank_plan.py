"""Rank allocation of a low-rank conversion: the blocks of latents of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from surgery.calibration.library import StatisticsLibrary
from surgery.common.errors import SurgeryError
from surgery.families.anatomy import AttentionAnatomy
from surgery.running.source import Source
from surgery.structures.kept_layers import converted_layers
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.transforms.allocation import water_fill
from surgery.transforms.low_rank import low_rank_layer
from surgery.transforms.low_rank_layer import Block
from surgery.transforms.low_rank_methods import METHODS, blocks_for, fisher_information, palu_ranks

Blocks = tuple[Block, ...]


def requested_rank(settings: LowRankSettings, anatomy: AttentionAnatomy) -> int:
    """Compute the average number of latents per token and layer, from ``rank`` or the ratio.

    Raises SurgeryError: the number is out of range.
    """
    full, ratio = anatomy.kv_width, 0.25 if settings.kv_ratio is None else settings.kv_ratio
    rank = settings.rank or int(ratio * full + 1e-9)
    if not 1 <= rank < full:
        raise SurgeryError(
            f"{rank} elements per token and layer: choose fewer than the source's {full} and at least one"
        )
    blocks_for(settings.method if settings.method in METHODS else "fisher", anatomy, rank)
    return rank


def plan_ranks(
    opened: Source, library: StatisticsLibrary, settings: LowRankSettings, kept_layers: frozenset[int]
) -> tuple[Blocks, ...]:
    """Plan the blocks of every layer of a conversion to low rank; empty for unchanged layers.

    Raises SurgeryError: the budget is impossible, or the method does not support the allocation.
    """
    first = opened.first
    rank, method = requested_rank(settings, first), settings.method
    layers = converted_layers(kept_layers, opened.layers)
    total = rank * len(layers)
    if method == "palu":
        information = [fisher_information(opened.anatomy(layer), library.load(layer)[0]) for layer in layers]
        pairs = palu_ranks(information, first, total)
        blocks = [blocks_for(method, first, keys + values, key_rank=keys) for keys, values in pairs]
        return _all_layers(blocks, layers, opened.layers)
    uniform = _all_layers([blocks_for(method, first, rank)] * len(layers), layers, opened.layers)
    comparable = METHODS[method].weighted and library.load(layers[0])[0].tokens > 0
    if settings.allocate == "uniform" or (settings.allocate == "auto" and not comparable):
        return uniform
    if not comparable:
        raise SurgeryError(f"--allocate {settings.allocate} requires method fisher or separate, and calibration text")
    spectra = _spectra(opened, library, uniform, settings)
    return _with_ranks(uniform, water_fill(spectra, total))


def _all_layers(blocks: Sequence[tuple], layers: list[int], count: int) -> tuple:
    """Expand the blocks of the converted layers to all layers; empty for unchanged layers."""
    every: list[tuple] = [()] * count
    for layer, each in zip(layers, blocks, strict=True):
        every[layer] = each
    return tuple(every)


def _with_ranks(blocks: tuple[Blocks, ...], ranks: Sequence[int]) -> tuple[Blocks, ...]:
    remaining = iter(ranks)
    return tuple(tuple(replace(block, rank=next(remaining)) for block in layer) for layer in blocks)


def _spectra(
    opened: Source, library: StatisticsLibrary, blocks: tuple[Blocks, ...], settings: LowRankSettings
) -> list[Tensor]:
    """Compute the energies of all possible latents, for every block of every layer."""
    spectra: list[Tensor] = []
    for layer, layer_blocks in enumerate(blocks):
        if layer_blocks:
            anatomy = opened.anatomy(layer).to(torch.float64)
            spectra += low_rank_layer(anatomy, library.load(layer)[0], layer_blocks, settings.method).energies
    return spectra
