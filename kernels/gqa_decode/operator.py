"""`gqa_decode`: the operator, registered with PyTorch as `surgery::gqa_decode`."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.backend import refusal, tell_once
from surgery.kernels.gqa_decode.reference import grouped_query_attention
from surgery.kernels.reference_gradient import differentiate_by
from surgery.kernels.tuned import key_of, tuned


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
    """Grouped-query attention of the last T tokens of each row over its cache.

    Args:
        query: [B, T, H, d], rotated; query t of a row stands at `length - T + t` of its tokens.
        key: [B, G, S, d], or [P, G, page, d] with `pages`; any strides but of the last dimension. H is a multiple of G.
        value: [B, G, S, v], or [P, G, page, v].
        scale: multiplies the logits.
        lengths: int32 [B] on the device, tokens of each row, the new ones included; None is all S (n·page).
        starts: int32 [B] on the device, the first token of each row that is no padding; None is 0.
        pages: int32 [B, n] on the device, where the tokens of each row are, page by page.
        window: latest tokens that a query sees, itself included; None for all.
        splits: programs that share the tokens of a row; None chooses by the shapes.

    Returns:
        out [B, T, H, v] in the query's dtype, and lse [B, T, H] fp32 (float64 of float64): the natural logarithm of the
        sum of exponentials of all scaled logits. Where there is nothing to see they are 0 and -∞.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    check_heads("gqa_decode", query, key, value)
    rows = query.shape[0]
    if pages is None and key.shape[0] != rows:
        raise ValueError(f"gqa_decode: {rows} rows of queries, {key.shape[0]} of keys")
    if pages is not None and (pages.dim() != 2 or pages.shape[0] != rows or pages.dtype != torch.int32):
        raise ValueError(f"gqa_decode: pages {tuple(pages.shape)} {pages.dtype}: int32 [{rows}, n] is needed")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"gqa_decode: {query.dtype} queries, {key.dtype} keys and {value.dtype} values")
    check_rows("gqa_decode", rows, lengths=lengths, starts=starts)
    check_numbers("gqa_decode", window=window, splits=splits)
    return _gqa_decode(query, key, value, scale, lengths, starts, pages, window, splits)


def check_heads(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises ValueError unless queries [B, T, H, d] fit to keys [·, G, S, d] and values [·, G, S, v]."""
    if not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(f"{name}: queries, keys and values must have 4 dimensions")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"{name}: keys {tuple(key.shape)} and values {tuple(value.shape)} of other tokens")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"{name}: queries of {query.shape[-1]} numbers and keys of {key.shape[-1]}")
    if key.shape[1] == 0 or query.shape[2] % key.shape[1]:
        raise ValueError(f"{name}: {query.shape[2]} query heads cannot share {key.shape[1]} KV heads")


def check_rows(name: str, rows: int, **counts: Tensor | None) -> None:
    """Raises ValueError unless every tensor given is int32 [rows]."""
    for what, count in counts.items():
        if count is not None and (count.shape != (rows,) or count.dtype != torch.int32):
            raise ValueError(f"{name}: {what} {tuple(count.shape)} {count.dtype}: int32 [{rows}] is needed")


def check_numbers(name: str, **numbers: int | None) -> None:
    """Raises ValueError unless every number given is positive."""
    for what, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name}: {what} {number}: at least 1")


def _reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    lengths: Tensor | None,
    starts: Tensor | None,
    pages: Tensor | None,
    window: int | None,
    splits: int | None,
) -> tuple[Tensor, Tensor]:
    return grouped_query_attention(query, key, value, scale, lengths, starts, pages, window)


@torch.library.custom_op("surgery::gqa_decode", mutates_args=())
def _gqa_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    lengths: Tensor | None,
    starts: Tensor | None,
    pages: Tensor | None,
    window: int | None,
    splits: int | None,
) -> tuple[Tensor, Tensor]:
    reason = refusal(query, key, value, lengths, starts, pages) or _unsupported(query, key, value)
    if reason:
        tell_once("gqa_decode", reason)
        return _reference(query, key, value, scale, lengths, starts, pages, window, splits)
    from surgery.kernels.gqa_decode.kernel import default_config, default_splits, launches, scratch

    groups, d, v = key.shape[1], key.shape[-1], value.shape[-1]
    page = 0 if pages is None else key.shape[2]
    shape = key_of(tokens=query.shape[1], heads=query.shape[2], groups=groups, d=d, v=v, page=page, dtype=query.dtype)
    config = tuned("gqa_decode", shape, query.device, default_config(query, key, value, pages))
    capacity = key.shape[2] * (1 if pages is None else pages.shape[1])
    out, lse = _outputs(query, v)
    parts, logs = scratch(query, v, splits or default_splits(query, groups, capacity, window, config))
    rows = {"lengths": side_by_side(lengths), "starts": side_by_side(starts), "pages": side_by_side(pages)}
    query = side_by_side(query)
    for launch in launches(query, key, value, scale, out, lse, parts, logs, **rows, window=window, config=config):
        launch.run()
    return out, lse


def side_by_side(tensor: Tensor | None) -> Tensor | None:
    """The tensor, copied if the numbers of its last dimension lie apart."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _unsupported(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    from surgery.kernels.gqa_decode.kernel import WIDEST

    for name, tensor in (("keys", key), ("values", value)):
        if tensor.stride(-1) != 1:
            return f"the numbers of a token's {name} do not lie side by side"
        if (1 << (tensor.shape[-1] - 1).bit_length()) * tensor.dtype.itemsize > WIDEST:
            return f"{name} of {tensor.shape[-1]} numbers in {tensor.dtype} are too wide"
    return None


def _outputs(query: Tensor, width: int) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:3], width))
    return out, query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))


@_gqa_decode.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    lengths: Tensor | None,
    starts: Tensor | None,
    pages: Tensor | None,
    window: int | None,
    splits: int | None,
) -> tuple[Tensor, Tensor]:
    return _outputs(query, value.shape[-1])


differentiate_by(_gqa_decode, _reference)
