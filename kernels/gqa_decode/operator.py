"""Operator `surgery::gqa_decode`: grouped-query decode attention over a contiguous or paged cache."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from surgery.kernels.checks import check_counts, check_dtypes, check_heads, check_keys, check_pages, check_positive
from surgery.kernels.gqa_decode.reference import grouped_query_attention
from surgery.kernels.operation import Operation, attention_outputs

WIDEST = 1024
"""Maximum bytes of one token's key or value in a tile, with the width padded to a power of two."""


def gqa_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    pages: Tensor | None = None,
    window: int | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute grouped-query attention of the last T tokens of each row over its cache.

    Args:
        query: [B, T, H, d], rotated; query t of a row is at position `length - T + t`.
        key: [B, G, S, d], or [P, G, page, d] with `pages`; only the last dimension must be contiguous. G divides H.
        value: [B, G, S, v], or [P, G, page, v].
        scale: multiplies the logits.
        lengths: int32 [B] on the device, tokens of each row, the new ones included; None for all S (n·page).
        starts: int32 [B] on the device, the first token of each row that is no padding; None for 0.
        pages: int32 [B, n] on the device, page table of each row.
        window: latest tokens that a query sees, itself included; None for all.
        splits: programs that share the tokens of a row; None to choose by shapes.

    Returns:
        out [B, T, H, v] in the query's dtype, and lse [B, T, H] fp32 (float64 for float64 inputs): the natural
        logarithm of the sum of exponentials of all scaled logits. Without a visible token they are 0 and -∞.

    Raises:
        ValueError: inconsistent shapes or dtypes.
    """
    return _gqa_decode(query, key, value, scale, lengths, starts, pages, window, splits)


def _check(call: SimpleNamespace) -> None:
    query, key = call.query, call.key
    check_keys("gqa_decode", query, key, call.value)
    check_heads("gqa_decode", query.shape[2], key.shape[1])
    rows = query.shape[0]
    if call.pages is None and key.shape[0] != rows:
        raise ValueError(f"gqa_decode: batch size is {rows} for queries, {key.shape[0]} for keys")
    check_pages("gqa_decode", rows, call.pages)
    check_dtypes("gqa_decode", query=query, key=key, value=call.value)
    check_counts("gqa_decode", rows, lengths=call.lengths, starts=call.starts)
    check_positive("gqa_decode", window=call.window, splits=call.splits)


def _unsupported(call: SimpleNamespace) -> str | None:
    for name, tensor in (("keys", call.key), ("values", call.value)):
        if tensor.stride(-1) != 1:
            return f"the last dimension of the {name} is not contiguous"
        if (1 << (tensor.shape[-1] - 1).bit_length()) * tensor.dtype.itemsize > WIDEST:
            return f"head size {tensor.shape[-1]} of {tensor.dtype} {name} exceeds {WIDEST // tensor.dtype.itemsize}"
    return None


_gqa_decode = Operation(
    "gqa_decode",
    grouped_query_attention,
    lambda call: attention_outputs(call.query, call.value.shape[-1]),
    _unsupported,
    _check,
    settings=("splits",),
    growth=({"key": 2, "value": 2},),
)
