"""`unpack_rows`: packed rows in pages, unpacked to memory that has pages too, as an operator of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from torch import Tensor

from surgery.kernels.checks import check_counts, check_pages
from surgery.kernels.mla_decode.operator import unsupported
from surgery.kernels.mla_decode.packed_operator import check_rows, within_lanes
from surgery.kernels.operation import Operation
from surgery.kernels.unpack_rows.reference import unpack_to_pages


def unpack_rows(
    rows: Tensor,
    step: Tensor,
    mean: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    *,
    fields: Sequence[int],
    lengths: Tensor,
    pages: Tensor,
    rotation: tuple[Tensor, Tensor] | None = None,
    exact: Tensor | None = None,
) -> None:
    """Unpack the rows of all tokens of some texts to `latent` and `rope_key`, of which `mla_decode` reads the pages.

    `mla_decode_packed` does the same in memory of its own, as large as if all texts were as long as they may become.
    Here the caller has memory for as many tokens as there are pages for, once for all layers. Texts that share a page
    write the same to it. The gains of a key norm are not unpacked: fp16 as they are, they are a view of the rows.

    Args:
        rows: int16 [P, page, lanes], as of `mla_decode_packed`.
        step, mean, fields, rotation: as of `mla_decode_packed`.
        latent: [P, page, r], filled; its last dimension is contiguous.
        rope_key: [P, page, ρ] in the same dtype, filled with rotated keys; its last dimension is contiguous.
        lengths: int32 [B], tokens of each text.
        pages: int32 [B, n], the pages that hold a text's tokens, in their order.
        exact: [B, E, r + ρ] in the dtype of the latent, not rotated: the first tokens of each text instead of theirs.

    Raises:
        ValueError: shapes, dtypes or fields that do not belong together.
    """
    within, begins = (None, None) if rotation is None else rotation
    if exact is not None and not exact.shape[1]:
        exact = None
    _unpack_rows(rows, step, mean, latent, rope_key, tuple(fields), lengths, pages, within, begins, exact)


def _check(call: SimpleNamespace) -> None:
    name, rows, latent, rope_key = "unpack_rows", call.rows, call.latent, call.rope_key
    for what, memory in (("latent", latent), ("rope_key", rope_key)):
        if memory.shape[:-1] != rows.shape[:2] or memory.dtype != latent.dtype:
            raise ValueError(f"{name}: {what} is {memory.dtype} {list(memory.shape)}, of rows {list(rows.shape)}")
        if memory.shape[-1] > 1 and memory.stride(-1) != 1:
            raise ValueError(f"{name}: the last dimension of {what} is not contiguous")
    check_rows(name, call, latent.shape[-1], latent.shape[-1] + rope_key.shape[-1], len(call.pages), latent.dtype)
    check_pages(name, len(call.pages), call.pages)
    check_counts(name, len(call.pages), lengths=call.lengths)


_unpack_rows = Operation(
    "unpack_rows",
    unpack_to_pages,
    lambda call: None,
    lambda call: within_lanes(call.fields) or unsupported(call),
    _check,
    mutates=("latent", "rope_key"),
)
