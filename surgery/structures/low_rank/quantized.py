"""``--to lowrank --bits auto``, and ``--to crosslayer --method cascade --bits auto``: rows of quantized latents.

One budget of bytes is spent over the latents of all layers; see :mod:`surgery.transforms.quantized_low_rank`. In a
cascade a layer's latents hold what the decoded ones of its group's earlier layers do not tell, so what there is to
spend bytes on follows from how those were spent: it is weighed with the same bytes in every layer.
"""

from __future__ import annotations

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
from surgery.transforms import quantized_low_rank
from surgery.transforms.low_rank_layer import SimulatedLowRank
from surgery.transforms.quantized_low_rank import QuantizedLowRank, RowSpectrum
from surgery.transforms.row_quantizer import reader


@dataclass
class _Group:
    """Latents and attentions of the earlier layers of a group, in one pass over the layers.

    Attributes:
        latents: decoded, of calibration text [N, T, r] each.
        attentions: their simulated attentions.
    """

    latents: list[Tensor] = field(default_factory=list)
    attentions: list[SimulatedLowRank] = field(default_factory=list)


class QuantizedRows(PackedRows[LowRankSettings]):
    """Keys and values are rebuilt from a quantized row a token, a layer's own.

    Attributes:
        name: of the target, in the report.
    """

    name = "lowrank"

    def __init__(self, opened: Source, settings: LowRankSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        self.earlier = (0,) * opened.layers
        self._group = _Group()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Heads that have latents together, the same in every layer: all of them; ranks follow from the runs."""
        heads = tuple(range(self.opened.first.kv_heads))
        return (Block(0, heads, heads),)

    @property
    def method(self) -> str:
        """Return the method of the report."""
        return self.settings.method

    @property
    def least_granules(self) -> int:
        """Granules of a row: every block has one."""
        return len(self.blocks)

    def likely(self, granules: int) -> Rows:
        """Return a row of 4 bits a value, as many of every block."""
        each, rest = divmod(granules, len(self.blocks))
        sizes = [self.granule * (each + (place < rest)) for place in range(len(self.blocks))]
        return tuple((("4+4", size),) for size in sizes)

    def writer(self, plans: Plans) -> OwnQuantizedLowRank:
        """Return what writes layers of these rows."""
        first, layers = self.opened.first, range(self.opened.layers)
        rows = [plans.get(layer, ()) for layer in layers]
        blocks = tuple(
            tuple(
                replace(block, rank=TokenFormat(each).channels) for block, each in zip(self.blocks, row, strict=False)
            )
            for row in rows
        )
        runs = tuple(tuple(chain.from_iterable(row)) for row in rows)
        return OwnQuantizedLowRank(first, blocks, self.earlier, runs=runs, first_tokens=self.first_tokens)

    def spectra(self, work: ConversionContext, layer: int, rows: Rows) -> RowSpectrum:
        """Energies of a layer's latents; in a group, after earlier layers of such rows."""
        with self.opened.stream.layer(layer) as streamed:
            return self.converted(work, layer, streamed, rows).spectrum

    def converted(self, work: ConversionContext, index: int, layer: StreamedLayer, rows: Rows) -> QuantizedLowRank:
        """Convert a layer; the layers of a group in their order."""
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

    def simulated(self, result: QuantizedLowRank) -> SimulatedLowRank:
        """Return a converted layer's simulated attention, which reads those of its group before it."""
        stream, read = self.opened.stream, reader(result.quantizer, self.first_tokens)
        layer, attentions = result.layer.to(stream.device, stream.dtype), self._group.attentions
        attentions.append(SimulatedLowRank(layer, tuple(attentions), read=read, remembers=any(self.earlier)))
        return attentions[-1]

    def group(self, layer: int) -> range:
        """Return the layers whose latents this one reads or that read its own."""
        return range(*group_of(layer, self.earlier))

    def pass_group(self, work: ConversionContext, group: range, hidden: Tensor) -> Tensor:
        """Carries [N, T, D] through layers that read each other's latents, as they become."""
        stream = self.opened.stream
        for index in group:
            attention = self.closed_form(work, index)
            with stream.layer(index) as layer:
                hidden = stream.run_layer(layer, hidden, work.settings.batch_size, attention)
        return hidden

    def is_settled(self, layer: int) -> bool:
        """Return whether no later layer reads this one's latents."""
        return group_of(layer, self.earlier)[1] == layer + 1

    def tensors(self, writer: OwnQuantizedLowRank, index: int, result: QuantizedLowRank) -> dict[str, Tensor]:
        """Return a converted layer's new tensors."""
        return writer.quantized_tensors(index, result.layer, result.quantizer)

    def widths(self, result: QuantizedLowRank) -> dict[str, int]:
        """Return the widths of a converted layer."""
        return {"rank": result.layer.rank, "shared_rank": result.layer.shared}

    def target(self, layers: list[RowLayerReport]) -> dict[str, Any]:
        """Return what the report says of low rank."""
        ranks, shared = [layer.rank for layer in layers], list(self.earlier)
        return {"to": self.name, "method": self.method, "ranks": ranks, "shared_layers": shared}
