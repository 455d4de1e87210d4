"""Operator `surgery::unpack_rows`: unpack packed rows into the caches that decode kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from torch import Tensor

from surgery.kernels.checks import check_counts, check_pages
from surgery.kernels.mla_decode.operator import unsupported
from surgery.kernels.mla_decode.packed_operator import check_rows, within_lanes
from surgery.kernels.mla_decode.row_slots import channels_of
from surgery.kernels.operation import Operation
from surgery.kernels.unpack_rows.reference import unpack_to_memory


def unpack_rows(
    rows: Tensor,
    step: Tensor,
    mean: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    *,
    fields: Sequence[int],
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    pages: Tensor | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
    exact: Tensor | None = None,
    exact_starts: Tensor | None = None,
) -> None:
    """Unpack the rows of all tokens of a batch of sequences into the `latent` and `rope_key` of `mla_decode`.

    `mla_decode_packed` unpacks into scratch memory, sized as if all sequences had their maximum length. Here the caller
    provides the memory: with pages for as many tokens as there are, once for all layers. Sequences that share a page
    write the same values to it. The gains of a key norm are not unpacked: stored as fp16, they are a view of the rows.

    Args:
        rows: int16 [P, page, lanes], as in `mla_decode_packed`; without pages [B, S, lanes], as are the outputs.
        step, mean, fields, rotation: as in `mla_decode_packed`.
        latent: output [P, page, r], or [P, page, r + ρ] with keys before their rotation; its last dimension is
            contiguous.
        rope_key: output [P, page, ρ] of rotated keys, in the same dtype; its last dimension is contiguous. ρ is 0 in
            low rank.
        lengths, starts: int32 [B], tokens of each sequence and its first one; None for all and 0.
        pages: int32 [B, n], page table of each sequence; requires `lengths`.
        exact: [B, E, r + ρ] in the dtype of the latent, not rotated: replaces the first tokens of each sequence.
        exact_starts: int32 [B], position of exact[:, 0]; None for 0.

    Raises:
        ValueError: inconsistent shapes, dtypes or fields.
    """
    within, begins = (None, None) if rotation is None else rotation
    if exact is not None and not exact.shape[1]:
        exact = None
    _unpack_rows(
        rows, step, mean, latent, rope_key, tuple(fields), lengths, starts, pages, within, begins, exact, exact_starts
    )


def _check(call: SimpleNamespace) -> None:
    name, rows, latent, rope_key = "unpack_rows", call.rows, call.latent, call.rope_key
    for what, memory in (("latent", latent), ("rope_key", rope_key)):
        if memory.shape[:-1] != rows.shape[:2] or memory.dtype != latent.dtype:
            expected = f"{latent.dtype} with the leading dimensions {list(rows.shape[:2])} of rows"
            raise ValueError(f"{name}: {what} must be {expected}, not {memory.dtype} {list(memory.shape)}")
        if memory.shape[-1] > 1 and memory.stride(-1) != 1:
            raise ValueError(f"{name}: the last dimension of {what} is not contiguous")
    channels = channels_of(call.fields)
    rank = channels - rope_key.shape[-1]
    batch = len(rows) if call.pages is None else len(call.pages)
    check_rows(name, call, rank, channels, batch, latent.dtype)
    if latent.shape[-1] not in (rank, channels):
        raise ValueError(f"{name}: latent has {latent.shape[-1]} elements, must be r = {rank} or r + ρ = {channels}")
    check_pages(name, batch, call.pages)
    check_counts(name, batch, lengths=call.lengths, starts=call.starts, exact_starts=call.exact_starts)


def _unsupported(call: SimpleNamespace) -> str | None:
    if call.pages is not None and call.lengths is None:
        return "pages require lengths"
    return within_lanes(call.fields) or unsupported(call)


_unpack_rows = Operation(
    "unpack_rows",
    unpack_to_memory,
    lambda call: None,
    _unsupported,
    _check,
    mutates=("latent", "rope_key"),
    growth=({"rows": 1, "latent": 1, "rope_key": 1}, {"begins": 1}),
)
