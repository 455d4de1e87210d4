"""Conversion of decoder attention masks to the row starts and lengths that kernels take.

Computed on the device, so that a step in a CUDA graph follows its mask, and once for all layers with the same mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.model.step_memo import once


def row_bounds(
    mask: Tensor | None, rows: int, queries: int, positions: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return lengths and starts of rows, from the positions that the newest token of each row sees.

    Decoder masks are causal, with padding on the left and, for a static cache, empty positions on the right, so the
    newest token sees one contiguous range. Holes in that range would be ignored; masks of transformers have none.

    Args:
        mask: [B or 1, 1, T, S], bool (true is visible) or additive. None: all positions are visible, unless several
            queries have more positions. Those belong to an empty static cache, as in transformers, and queries are
            causal over the first T positions.
        rows, queries, positions: B, T, S.
        device: device of the results.

    Returns:
        Lengths and starts, int32 [B]: the end (exclusive) and the first of the visible positions; None for S or 0.
    """
    if mask is None:
        empty = 1 < queries < positions
        return torch.full((rows,), queries, dtype=torch.int32, device=device) if empty else None, None
    return once(mask, (row_bounds, rows), lambda: _bounds(mask, rows))


def _bounds(mask: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    visible = mask[:, 0, -1]
    if visible.dtype != torch.bool:
        visible = visible > torch.finfo(mask.dtype).min / 2
    visible = visible.expand(rows, -1).to(torch.int32)
    starts = visible.argmax(dim=-1)
    lengths = visible.shape[-1] - visible.flip(-1).argmax(dim=-1)
    return lengths.to(torch.int32), starts.to(torch.int32)
