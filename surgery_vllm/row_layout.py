"""Byte layout of quantized MLA and low-rank layers in vLLM's blocks: packed rows, and first tokens in full precision.

vLLM allocates blocks of one size in bytes, from one pool, to groups of layers. So all layers share a block, whatever
the size of their rows: a block holds its tokens layer by layer, without padding. The first tokens of a request are in
a separate block of the same size, one more per request. If kernels read rows, the end of a block is scratch memory into
which each layer in turn unpacks the tokens of the block. No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surgery.model.layer_entry import LayerEntry
from surgery.model.token_format import GAIN_BYTES

ALIGNED = 16
"""Alignment in bytes of vectorized loads on GPUs."""


def row_bytes(entry: LayerEntry, config: Any, processes: int = 1) -> int:
    """Return the bytes of a token's row; elements of a token beyond the packed channels are gains of a key norm.

    Each of several tensor-parallel processes has the gains of its KV heads, at least one.
    """
    gains = entry.width(config) - entry.format.channels
    return entry.format.row_bytes + GAIN_BYTES * (max(1, gains // processes) if gains else 0)


@dataclass(frozen=True)
class RowLayout:
    """Layout of a block shared by all layers of a model.

    Attributes:
        rows: bytes of a token's row, by layer.
        first: bytes of all first tokens in the model's dtype, by layer.
        page: tokens of a block.
        unpacked: bytes of an unpacked token of the widest layer; 0 if tokens are not unpacked.
    """

    rows: tuple[int, ...]
    first: tuple[int, ...]
    page: int
    unpacked: int = 0

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerEntry],
        config: Any,
        number_bytes: int,
        block_size: int,
        unpacked: int = 0,
        processes: int = 1,
    ) -> "RowLayout":
        """Choose the block size: the smallest multiple of vLLM's that holds the first tokens of all layers.

        Tokens are not unpacked if their memory would not be aligned to `ALIGNED` bytes. `processes` divide the heads.
        """
        rows = tuple(row_bytes(entry, config, processes) for entry in layers)
        first = tuple(entry.first_tokens * entry.format.channels * number_bytes for entry in layers)
        page = max(-(-sum(first) // sum(rows)), *(entry.first_tokens for entry in layers), 1)
        page = block_size * -(-page // block_size)
        return cls(rows, first, page, 0 if page * sum(rows) % ALIGNED or page * unpacked % ALIGNED else unpacked)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token: its rows of all layers, and one layer unpacked."""
        return sum(self.rows) + self.unpacked

    def rows_of(self, layer: int) -> slice:
        """Return the bytes of a block with a layer's rows."""
        start = self.page * sum(self.rows[:layer])
        return slice(start, start + self.page * self.rows[layer])

    def unpacked_of(self) -> slice:
        """Return the bytes of a block for unpacked tokens."""
        return slice(self.page * sum(self.rows), self.page * self.token_bytes)

    def first_of(self, layer: int) -> slice:
        """Return the bytes of a block with a layer's first tokens."""
        start = sum(self.first[:layer])
        return slice(start, start + self.first[layer])
