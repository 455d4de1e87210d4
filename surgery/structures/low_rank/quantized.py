"""``--to lowrank --bits auto``, and ``--to crosslayer``: packed rows of quantized latents.

One byte budget is allocated over the latents of all layers; see :mod:`surgery.transforms.quantized_low_rank`. In a
cascade, a layer's latents encode the residual of the prediction from decoded latents of earlier layers in the group.
Their energies therefore depend on the bytes of the earlier layers; they are computed with equal bytes in every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from surgery.architectures.low_rank import OwnQuantizedLowRank
from surgery.common.progress import Progress
from surgery.model.low_rank_entry import Block
from surgery.model.token_format import TokenFormat
from surgery.running.layer_stream import StreamedLayer
from surgery.running.source import Source
from surgery.structures.context import ConversionContext
from surgery.structures.low_rank.groups import group_of
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.packed_rows import PackedRows, Plans, RowLayerReport, Rows
from surgery.structures.refit import Attended
from surgery.transforms import quantized_low_rank
from surgery.transforms.low_rank_layer import SimulatedLowRank
from surgery.transforms.quantized_low_rank import QuantizedLowRank, RowSpectrum
from surgery.transforms.row_quantizer import reader


@dataclass
class _Group:
    """State of the earlier layers of a group: decoded latents [N, T, r] of the calibration text, and surrogates."""

    latents: list[Tensor] = field(default_factory=list)
    attentions: list[SimulatedLowRank] = field(default_factory=list)


class QuantizedRows(PackedRows[LowRankSettings]):
    """Conversion to keys and values that are rebuilt from one packed row per token and layer."""

    name = "lowrank"

    def __init__(self, opened: Source, settings: LowRankSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        self.earlier = (0,) * opened.layers
        self._group = _Group()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of heads that share latents, the same in every layer; ranks follow from the runs."""
        heads = tuple(range(self.opened.first.kv_heads))
        return (Block(0, heads, heads),)

    @property
    def method(self) -> str:
        """Name of the method in the report."""
        return self.settings.method

    @property
    def least_granules(self) -> int:
        """Minimum number of granules of a row: one per block."""
        return len(self.blocks)

    def likely(self, granules: int) -> Rows:
        """Return a row of 4 bits per value, split evenly over the blocks."""
        each, rest = divmod(granules, len(self.blocks))
        sizes = [self.granule * (each + (block < rest)) for block in range(len(self.blocks))]
        return tuple((("4+4", size),) for size in sizes)

    def writer(self, plans: Plans) -> OwnQuantizedLowRank:
        first, layers = self.opened.first, range(self.opened.layers)
        rows = [plans.get(layer, ()) for layer in layers]
        blocks = tuple(
            tuple(
                replace(block, rank=TokenFormat(each).channels) for block, each in zip(self.blocks, row, strict=False)
            )
            for row in rows
        )
        runs = tuple(tuple(chain.from_iterable(row)) for row in rows)
        return OwnQuantizedLowRank(first, blocks, shared_layers=self.earlier, runs=runs, first_tokens=self.first_tokens)

    def spectra(self, work: ConversionContext, layer: int, rows: Rows) -> RowSpectrum:
        """Compute the energies of a layer's latents; in a group, given the rows of the earlier layers."""
        with self.opened.stream.layer(layer) as streamed:
            return self.converted(work, layer, streamed, rows).spectrum

    def converted(self, work: ConversionContext, index: int, layer: StreamedLayer, rows: Rows) -> QuantizedLowRank:
        """Convert a layer; must be called in order for the layers of a group."""
        start, stop = group_of(index, self.earlier)
        if index == start:
            self._group = _Group()
        inputs, first = work.attention_inputs(index, layer), self.first_tokens
        shared = torch.cat(self._group.latents, dim=-1) if index > start else None
        anatomy, statistics = (
            self.opened.anatomy(index).to(torch.float64),
            work.library.load(index, self.first_tokens)[0],
        )
        stored = self.opened.first.q.dtype
        remainder = quantized_low_rank.unpredicted(anatomy, statistics, self.blocks, inputs, shared, first, stored)
        result = quantized_low_rank.convert_layer(anatomy, statistics, remainder, rows, inputs, shared, first)
        if index + 1 < stop:
            stream = self.opened.stream
            form = result.layer.to(stream.device, stream.dtype)
            self._group.latents.append(reader(result.quantizer, first)(form.latents(inputs, shared)))
        return result

    def attended(self, index: int, result: QuantizedLowRank) -> Attended:
        stream, start = self.opened.stream, group_of(index, self.earlier)[0]
        layer, earlier = result.layer.to(stream.device, stream.dtype), self._group.latents[: index - start]
        read = reader(result.quantizer, self.first_tokens)

        def attended(inputs: Tensor, batch: slice) -> Tensor:
            shared = [each[batch] for each in earlier]
            own = read(layer.latents(inputs, torch.cat(shared, dim=-1) if shared else None))
            return layer.source.gated(layer.attend(inputs, torch.cat([*shared, own], dim=-1)), inputs)

        return attended

    def with_output(self, result: QuantizedLowRank, refit: Callable[[Tensor], Tensor]) -> QuantizedLowRank:
        source = replace(result.layer.source, o=refit(result.layer.source.o))
        return replace(result, layer=replace(result.layer, source=source))

    def simulated(self, result: QuantizedLowRank) -> SimulatedLowRank:
        """Return a surrogate module of a converted layer, which reads the group's earlier surrogate modules."""
        stream, read = self.opened.stream, reader(result.quantizer, self.first_tokens)
        layer, attentions = result.layer.to(stream.device, stream.dtype), self._group.attentions
        attentions.append(SimulatedLowRank(layer, tuple(attentions), read=read, remembers=any(self.earlier)))
        return attentions[-1]

    def group(self, layer: int) -> range:
        return range(*group_of(layer, self.earlier))

    def pass_group(self, work: ConversionContext, group: range, hidden: Tensor) -> Tensor:
        """Run hidden states [N, T, D] through the converted layers of a group, which read each other's latents."""
        stream = self.opened.stream
        for index in group:
            attention = self.closed_form(work, index)
            with stream.layer(index) as layer:
                hidden = stream.run_layer(layer, hidden, work.settings.batch_size, attention)
        return hidden

    def is_settled(self, layer: int) -> bool:
        return group_of(layer, self.earlier)[1] == layer + 1

    def tensors(self, writer: OwnQuantizedLowRank, index: int, result: QuantizedLowRank) -> dict[str, Tensor]:
        return writer.quantized_tensors(index, result.layer, result.quantizer)

    def widths(self, result: QuantizedLowRank) -> dict[str, int]:
        return {"rank": result.layer.rank, "shared_rank": result.layer.shared}

    def target(self, layers: list[RowLayerReport]) -> dict[str, Any]:
        ranks, shared = [layer.rank for layer in layers], list(self.earlier)
        return {"to": self.name, "method": self.method, "ranks": ranks, "shared_layers": shared}
