"""Operator `surgery::mla_decode_packed`: absorbed MLA decode attention over packed rows of a quantized cache."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from surgery.kernels.checks import check_counts, check_pages
from surgery.kernels.lowrank_decode.reference import STEP
from surgery.kernels.mla_decode.operator import unsupported
from surgery.kernels.mla_decode.packed_reference import packed_latent_attention
from surgery.kernels.mla_decode.row_slots import channels_of, grouped, row_bytes
from surgery.kernels.operation import Operation, attention_outputs


def mla_decode_packed(
    query: Tensor,
    rows: Tensor,
    step: Tensor,
    mean: Tensor,
    scale: float,
    *,
    fields: Sequence[int],
    rank: int,
    rotation: tuple[Tensor, Tensor] | None = None,
    exact: Tensor | None = None,
    exact_starts: Tensor | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    pages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of the last T tokens of each row over packed rows shared by all heads.

    The value of a token is its latent, of v = r elements. If queries are ρ elements wider than a row, it is the latent
    and the shared key before its rotation, of v = r + ρ elements.

    A row has one bit field for each of its r + ρ channels, the latent's first, and after them the gains of a key norm.
    A channel of b bits with code c has the value `mean + step · (c - (2^b - 1) / 2)`.

    Args:
        query: [B, T, H, v + ρ], the last ρ rotated; neighboring elements are rotated together.
        rows: int16 [B, S, lanes], two bytes per lane; with `pages` [P, page, lanes]. Lanes after the last field are
            fp16 gains: factors on the logits of H / G heads each.
        step, mean: fp32 [r + ρ]. Both channels of a rotated pair have the step of the first.
        scale: multiplies the logits.
        fields: flattened (first byte, number of bytes, lowest bit, bits) of each field, as in `TokenFormat.fields`.
            Field f of byte b is channel `f * bytes + b` of its run.
        rank: r.
        rotation: `rotation_tables(inv_freq, positions)` for at least as many positions as there are; needed if ρ > 0.
        exact: [B, E, r + ρ] in the query's dtype, not rotated: full-precision tokens, read instead of packed ones.
        exact_starts: int32 [B], position of exact[:, 0]; None for 0. There are no tokens before it.
        lengths: int32 [B], tokens of each row, the T new ones included; None for all S.
        starts: int32 [B], the first visible token; None for 0.
        pages: int32 [B, n], page table of each row.

    Returns:
        out [B, T, H, v] in the query's dtype and lse [B, T, H] fp32, as in `mla_decode`.

    Raises:
        ValueError: inconsistent shapes, dtypes or fields.
    """
    within, begins = (None, None) if rotation is None else rotation
    if exact is not None and not exact.shape[1]:
        exact = None
    return _mla_decode_packed(
        query, rows, step, mean, scale, tuple(fields), rank, within, begins, exact, exact_starts, lengths, starts, pages
    )  # fmt: skip


def over_values(query: Tensor, rope_dim: int, added: int) -> Tensor:
    """Insert zeros into queries [..., r + ρ] for ``added`` channels after the latent that are read for values only."""
    if not added:
        return query
    content, rope = query.split((query.shape[-1] - rope_dim, rope_dim), dim=-1)
    return torch.cat((content, query.new_zeros(*query.shape[:-1], added), rope), dim=-1)


def _check(call: SimpleNamespace) -> None:
    name, query, rows = "mla_decode_packed", call.query, call.rows
    if query.dim() != 4:
        raise ValueError(f"{name}: query must be [B, T, H, v + ρ], not {list(query.shape)}")
    channels = channels_of(call.fields)
    check_rows(name, call, call.rank, channels, len(query), query.dtype)
    if query.shape[-1] not in (channels, 2 * channels - call.rank):
        raise ValueError(
            f"{name}: query has {query.shape[-1]} elements, must be r + ρ = {channels}, "
            f"or r + 2ρ = {2 * channels - call.rank} if values include keys"
        )
    if call.pages is None and rows.shape[0] != query.shape[0]:
        raise ValueError(f"{name}: batch size is {query.shape[0]} for queries, {rows.shape[0]} for packed rows")
    gains = rows.shape[-1] - row_bytes(call.fields) // 2
    if gains and query.shape[2] % gains:
        raise ValueError(f"{name}: {query.shape[2]} query heads must be a multiple of {gains} gains")
    check_pages(name, query.shape[0], call.pages)
    check_counts(name, query.shape[0], lengths=call.lengths, starts=call.starts, exact_starts=call.exact_starts)


def check_rows(name: str, call: SimpleNamespace, rank: int, width: int, batch: int, dtype: torch.dtype) -> None:
    """Check packed rows, tables and full-precision tokens against the number of channels, batch size and dtype."""
    if len(call.fields) % 4 or not call.fields:
        raise ValueError(f"{name}: fields must have 4 integers per field, not {len(call.fields)} in all")
    channels, rows = channels_of(call.fields), call.rows
    if width != channels or not 0 < rank <= width or (width - rank) % 2:
        raise ValueError(f"{name}: fields have {channels} channels, must be r + ρ = {width} with rank {rank}, even ρ")
    if rows.dim() != 3 or rows.dtype != torch.int16 or 2 * rows.shape[-1] < row_bytes(call.fields):
        raise ValueError(
            f"{name}: rows must be int16 [B, S, n] with {row_bytes(call.fields)} bytes or more per row, "
            f"not {rows.dtype} {list(rows.shape)}"
        )
    for what, tensor in (("step", call.step), ("mean", call.mean)):
        if tensor.shape != (width,) or tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name}: {what} must be fp32 [{width}], not {tensor.dtype} {list(tensor.shape)}")
    pairs = (width - rank) // 2
    if pairs and (call.within is None or call.within.shape != (2, STEP, pairs) or call.begins.shape[::2] != (2, pairs)):
        raise ValueError(f"{name}: rotation must be the result of rotation_tables for {pairs} pairs")
    exact = call.exact
    if exact is not None and (exact.dim() != 3 or exact.shape[::2] != (batch, width) or exact.dtype != dtype):
        raise ValueError(f"{name}: exact must be {dtype} [{batch}, E, {width}], not {exact.dtype} {list(exact.shape)}")


def within_lanes(fields: Sequence[int]) -> str | None:
    """Return the reason why no kernel supports rows with these fields, or None."""
    if any(first % 2 or count % 2 for first, count, _, _ in grouped(fields)):
        return "runs of packed rows are not aligned to 16 bits"
    return None


def _unsupported(call: SimpleNamespace) -> str | None:
    if call.pages is not None and call.lengths is None:
        return "pages require lengths"
    return within_lanes(call.fields) or unsupported(call)


_mla_decode_packed = Operation(
    "mla_decode_packed",
    packed_latent_attention,
    lambda call: attention_outputs(call.query, call.query.shape[-1] - (channels_of(call.fields) - call.rank)),
    _unsupported,
    _check,
    growth=({"rows": 1}, {"begins": 1}),
    kernel="surgery.kernels.mla_decode.packed_kernel",
)
