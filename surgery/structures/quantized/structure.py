"""``surgery convert --to quantized``: the source's keys and values in a few bits, in one row a token.

Every KV head has two bases of its own, for its keys before RoPE and for its values. Each component has the bits that it
is worth. Heads share nothing, so one is read by products of its own size. Low rank, whose heads share latents, loses
less at the same bytes and takes several times the operations to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.checkpoint import TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.model.low_rank_entry import Block
from surgery.running.source import Source
from surgery.structures.base import Candidate, TargetOption
from surgery.structures.context import ConversionContext
from surgery.structures.low_rank.quantized import QuantizedRows
from surgery.structures.packed_rows import Plans, RowLayerReport, Rows
from surgery.structures.quantized.settings import QuantizedSettings

PATTERNS = {8: "8", 4: "4+4", 2: "2+2+2+2"}
"""Pattern of the bytes of a row whose values have the same bits."""


class Quantized(QuantizedRows):
    """Keys and values of every head in a basis of their own, quantized."""

    name, method = "quantized", "heads"
    options = (TargetOption(place=2),)

    def __init__(self, opened: Source, settings: QuantizedSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        self.plans = self._uniform()

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Bits by value: the same number for all loses more at the same bytes."""
        return [Candidate({"bits": "auto"})]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Keys of every head, then values of every head."""
        heads = range(self.opened.first.kv_heads)
        return *(Block(0, (head,), ()) for head in heads), *(Block(0, (), (head,)) for head in heads)

    def granule_bytes(self) -> int:
        """Return 4, as single heads have few bytes and no kernel loads 16 at once; 2 of small heads or uniform bits."""
        return 4 if self.settings.bits == "auto" and self.opened.first.head_dim >= 32 else 2

    def ratio(self) -> float:
        """Return the share of the source's bytes, which uniform bits say themselves."""
        if self.settings.bits == "auto":
            return super().ratio()
        return self.settings.bits / (8 * self.opened.first.q.dtype.itemsize)

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Choose the bits of every value of all layers, unless they are uniform."""
        return super().plan(work) if self.plans is None else self.planned_tensors(self.plans)

    def target(self, layers: list[RowLayerReport]) -> dict[str, Any]:
        """Return what the report says of the target."""
        return {**super().target(layers), "bits": self.settings.bits}

    def _uniform(self) -> Plans | None:
        """Return rows that hold every value in the same bits; None with automatic bits."""
        if (bits := self.settings.bits) == "auto":
            return None
        first = self.opened.first
        dims = [dim for dim in (first.head_dim, first.value_dim) for _ in range(first.kv_heads)]
        if any(dim * bits % 16 for dim in dims):
            raise SurgeryError(f"bits {bits}: {dims[0]} values of a head fill no pair of bytes; try 8", setting="bits")
        rows: Rows = tuple(((PATTERNS[bits], dim * bits // 8),) for dim in dims)
        return dict.fromkeys(self.layers, rows)
