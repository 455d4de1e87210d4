"""Bytes of MLA and low rank in bits in vLLM's pages: packed rows of all tokens, and first tokens in full precision.

vLLM hands out blocks of one size in bytes, from one pool, to groups of layers. So all layers share a block, whatever
their rows weigh: it holds so many tokens, layer by layer, with nothing padded. The first tokens of a request lie in a
block of their own, of the same size: one more block a request. Where kernels read rows, the end of a block is memory
in which one layer after the other unpacks the tokens of the block. No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surgery.model.layer_entry import LayerEntry
from surgery.model.token_format import GAIN_BYTES

ALIGNED = 16
"""Bytes that a GPU reads at once."""


def row_bytes(entry: LayerEntry, config: Any) -> int:
    """Count the bytes of a token's row; elements of a token beyond the packed channels are gains of a key norm."""
    return entry.format.row_bytes + GAIN_BYTES * (entry.width(config) - entry.format.channels)


@dataclass(frozen=True)
class RowLayout:
    """Blocks of all layers of a model.

    Attributes:
        rows: bytes of a token's row in every layer.
        first: bytes of all first tokens in every layer, in the model's dtype.
        page: tokens of a block.
        unpacked: bytes of a token that is unpacked, of the widest layer; 0 where none is.
    """

    rows: tuple[int, ...]
    first: tuple[int, ...]
    page: int
    unpacked: int = 0

    @classmethod
    def of(
        cls, layers: Sequence[LayerEntry], config: Any, number_bytes: int, block_size: int, unpacked: int = 0
    ) -> "RowLayout":
        """Take as many tokens of a block as vLLM proposes, or the fewest whole times of it that hold first tokens.

        Tokens are unpacked only in blocks where that memory begins at a multiple of `ALIGNED`.
        """
        rows = tuple(row_bytes(entry, config) for entry in layers)
        first = tuple(entry.first_tokens * entry.format.channels * number_bytes for entry in layers)
        page = max(-(-sum(first) // sum(rows)), *(entry.first_tokens for entry in layers), 1)
        page = block_size * -(-page // block_size)
        return cls(rows, first, page, 0 if page * sum(rows) % ALIGNED or page * unpacked % ALIGNED else unpacked)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, of all layers, and of one layer unpacked."""
        return sum(self.rows) + self.unpacked

    def rows_of(self, layer: int) -> slice:
        """Locate a layer's rows among the bytes of a block."""
        start = self.page * sum(self.rows[:layer])
        return slice(start, start + self.page * self.rows[layer])

    def unpacked_of(self) -> slice:
        """Locate the memory for unpacked tokens among the bytes of a block."""
        return slice(self.page * sum(self.rows), self.page * self.token_bytes)

    def first_of(self, layer: int) -> slice:
        """Locate a layer's first tokens among the bytes of a block."""
        start = sum(self.first[:layer])
        return slice(start, start + self.first[layer])
