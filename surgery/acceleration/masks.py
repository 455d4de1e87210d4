"""Attention masks of a decoder in the form that kernels take: where each row begins and where it ends.

Read on the device alone, so that a step recorded in a CUDA graph follows the mask that it is given; and once for all
layers that get the same mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.model.step_memo import once


def row_bounds(
    mask: Tensor | None, rows: int, queries: int, positions: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Lengths and starts of rows, from what their newest token sees.

    Decoder masks are causal, with padding on the left and, of a static cache, empty positions on the right: what the
    newest token sees is one run of positions. A mask with holes in that run, as none of transformers' is, would be read
    without.

    Args:
        mask: [B or 1, 1, T, S], bool (true is seen) or additive. None where it would say nothing: every position is
            seen, or of several queries in front of more positions, which then are empty, each sees those up to its own,
            as of transformers' static caches before their first token.
        rows, queries, positions: B, T, S.
        device: of what is returned.

    Returns:
        Two int32 [B], the position behind the newest token's last, and the first that it sees; None for S, and for 0.
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
