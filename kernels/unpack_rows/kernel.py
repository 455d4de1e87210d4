"""Launch of `unpack_rows_kernel` (see `mla_decode/packed_kernel.py`) into a paged latent cache."""

from __future__ import annotations

from types import SimpleNamespace

import triton

from surgery.kernels.launch import Launch, launches_of
from surgery.kernels.mla_decode.packed_kernel import BLOCK_TOKENS, unpack_launch
from surgery.kernels.split_kv import processors
from surgery.kernels.unpack_rows.reference import unpack_to_pages

PROGRAMS = 16
"""Programs per multiprocessor: its capacity for programs of four warps."""


@launches_of(unpack_to_pages)
def launches(args: SimpleNamespace) -> list[Launch]:
    """Return the launch that fills `latent` and `rope_key`; the programs of a sequence share its tokens."""
    batch = args.pages.shape[0]
    # A plan serves all page tables whose width has the same bit length, so size the grid for the widest.
    room = (1 << int(args.pages.shape[1]).bit_length()) * args.rows.shape[1]
    programs = min(triton.cdiv(room, BLOCK_TOKENS), triton.cdiv(PROGRAMS * processors(args.rows.device), batch))
    return [unpack_launch(vars(args), (programs, batch), args.latent, args.rope_key, to_pages=True)]
