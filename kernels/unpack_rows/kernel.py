"""Launch of `unpack_rows_kernel` (see `mla_decode/packed_kernel.py`) into memory of the caller."""

from __future__ import annotations

from types import SimpleNamespace

import triton

from surgery.kernels.launch import Launch, launches_of
from surgery.kernels.mla_decode.packed_kernel import BLOCK_TOKENS, unpack_launch
from surgery.kernels.split_kv import processors
from surgery.kernels.unpack_rows.reference import unpack_to_memory

PROGRAMS = 16
"""Programs per multiprocessor: its capacity for programs of four warps."""


@launches_of(unpack_to_memory)
def launches(args: SimpleNamespace) -> list[Launch]:
    """Return the launch that fills `latent` and `rope_key`; the programs of a sequence share its tokens."""
    rows, pages = args.rows, args.pages
    text, page = (rows, 1) if pages is None else (pages, rows.shape[1])
    # A plan serves all texts whose capacity has the same bit length, so size the grid for the longest.
    room = (1 << int(text.shape[1]).bit_length()) * page
    programs = min(triton.cdiv(room, BLOCK_TOKENS), triton.cdiv(PROGRAMS * processors(rows.device), len(text)))
    to_pages = pages is not None
    return [unpack_launch(vars(args), (programs, len(text)), args.latent, args.rope_key, to_pages=to_pages)]
