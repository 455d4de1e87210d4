"""``surgery convert --to quantized``: quantized keys and values, in one packed row per token.

Every KV head has one basis for its keys before RoPE and its values together; with uniform bits, one for each. Heads
share no latents, so decoding a head takes products of its widths only; low rank loses less at the same bytes and takes
several times the operations.
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
"""Byte pattern of rows with uniform bits."""


class Quantized(QuantizedRows):
    """Conversion to quantized keys and values in a basis of its own for every head."""

    name, method = "quantized", "heads"
    options = (TargetOption(option_rank=2),)

    def __init__(self, opened: Source, settings: QuantizedSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        self.plans = self._uniform()

    @classmethod
    def candidates(cls, config: Mapping[str, Any]) -> list[Candidate]:
        """Return the candidate with bits by value; uniform bits increase the loss more at the same bytes."""
        return [Candidate({})]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of latents: keys and values of every head; with uniform bits, keys and then values apart.

        Keys tell much about values: in a common basis the loss predicted for SmolLM2-135M is half as large.
        """
        heads = range(self.opened.first.kv_heads)
        if self.settings.bits == "auto":
            return tuple(Block(0, (head,), (head,)) for head in heads)
        return *(Block(0, (head,), ()) for head in heads), *(Block(0, (), (head,)) for head in heads)

    def granule_bytes(self) -> int:
        """Return the granule: 4 bytes, as no kernel loads 16 from a single head; 2 for small heads or uniform bits."""
        return 4 if self.settings.bits == "auto" and self.opened.first.head_dim >= 32 else 2

    def ratio(self) -> float:
        """Return the KV ratio; uniform bits determine it."""
        if self.settings.bits == "auto":
            return super().ratio()
        return self.settings.bits / (8 * self.opened.first.q.dtype.itemsize)

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Allocate bits to the channels of all layers, unless they are uniform."""
        return super().plan(work) if self.plans is None else self.planned_tensors(self.plans)

    def target(self, layers: list[RowLayerReport]) -> dict[str, Any]:
        return {**super().target(layers), "bits": self.settings.bits}

    def _uniform(self) -> Plans | None:
        """Return rows of uniform bits; None with automatic bits."""
        if (bits := self.settings.bits) == "auto":
            return None
        first = self.opened.first
        dims = [dim for dim in (first.head_dim, first.value_dim) for _ in range(first.kv_heads)]
        if any(dim * bits % 16 for dim in dims):
            raise SurgeryError(
                f"bits {bits}: head size {dims[0]} does not fill whole byte pairs; use 8", setting="bits"
            )
        rows: Rows = tuple(((PATTERNS[bits], dim * bits // 8),) for dim in dims)
        return dict.fromkeys(self.layers, rows)
