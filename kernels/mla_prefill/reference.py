r"""PyTorch reference of prefill attention.

Softmax attention whose keys and values may differ in width, like the expanded heads of multi-head latent attention
(DeepSeek-V2, arXiv 2405.04434, equations 9-19: 128 + 64 elements of a key, 128 of a value).

Each query sees one interval of positions, whose ends do not decrease from query to query: under padding on either side,
causality, a window, and contiguous documents. The kernels rely on that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.backend import DTYPES


def document_bounds(documents: Tensor) -> Tensor:
    """Return int32 [2, B, S] for documents [B, S]: start and end (exclusive) of each position's document.

    Documents are contiguous: an ID that recurs later is another document.
    """
    positions = documents.shape[1]
    index = torch.arange(positions, device=documents.device)
    differs = documents[:, 1:] != documents[:, :-1]
    first = torch.nn.functional.pad(differs, (1, 0)) * index
    behind = torch.where(torch.nn.functional.pad(differs, (0, 1), value=True), index + 1, positions)
    return torch.stack([first.cummax(1).values, behind.flip(1).cummin(1).values.flip(1)]).int()


def visible_positions(
    tokens: int,
    positions: int,
    window: int | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    bounds: Tensor | None = None,
    *,
    causal: bool = True,
    device: torch.device | None = None,
) -> Tensor:
    """Return the boolean mask [B or 1, T, S] of visible positions; arguments as in `operator.mla_prefill`.

    `bounds` are `document_bounds`; with `causal` a query sees no position after its own.
    """
    position = torch.arange(positions, device=device)
    first = 0 if starts is None else starts[:, None, None]
    behind = positions if lengths is None else lengths[:, None, None]
    query = torch.arange(positions - tokens, positions, device=device)[None, :, None]
    visible = (position >= first) & (position < behind) & (query >= first) & (query < behind)
    if causal:
        visible = visible & (position <= query)
    if window is not None:
        visible = visible & (position > query - window)
    if bounds is not None:
        place = query[..., 0].expand(bounds.shape[1], -1)
        low, high = (bound.gather(1, place)[:, :, None] for bound in bounds)
        visible = visible & (position >= low) & (position < high)
    return visible


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    starts: Tensor | None = None,
    lengths: Tensor | None = None,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention and the logsumexp of each query, both differentiable.

    Materializes all logits [B, H, T, S], in fp32 for narrower dtypes.

    Args:
        query: [B, H, T, c].
        key: [B, K, S, c].
        value: [B, K, S, v].
        scale: multiplies the logits.
        window, starts, lengths, bounds: see `visible_positions`.

    Returns:
        [B, T, H, v] in the dtype of `query`, and [B, H, T] in fp32 (fp64 for fp64).
    """
    dtype, out_dtype = torch.float32 if query.dtype in DTYPES else query.dtype, query.dtype
    batch, heads, tokens, _ = query.shape
    kv_heads, positions = key.shape[1:3]
    visible = visible_positions(tokens, positions, window, starts, lengths, bounds, device=query.device)
    sees = visible.any(-1)[:, None, None]  # [B or 1, 1, 1, T]
    is_visible = visible.any(-2)[:, None, :, None]  # [B or 1, 1, S, 1]
    # Invisible tokens may hold NaN.
    query = query.to(dtype).unflatten(1, (kv_heads, heads // kv_heads)).masked_fill(~sees[..., None], 0)
    key, value = key.to(dtype).masked_fill(~is_visible, 0), value.to(dtype).masked_fill(~is_visible, 0)
    visible = visible[:, None, None]
    logits = torch.einsum("bkgtc,bksc->bkgts", query, key) * scale
    logits = logits.masked_fill(~visible, -torch.inf).masked_fill(~sees[..., None], 0)
    log = logits.logsumexp(-1)
    weights = (logits - log[..., None]).exp().masked_fill(~visible, 0)
    attn_output = torch.einsum("bkgts,bksv->btkgv", weights, value)
    out = attn_output.reshape(batch, tokens, heads, value.shape[-1]).to(out_dtype)
    return out, log.masked_fill(~sees, -torch.inf).flatten(1, 2).contiguous()
