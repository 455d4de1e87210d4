"""The launch of `unpack_rows_kernel` of `mla_decode_packed` that unpacks tokens to memory of their pages."""

from __future__ import annotations

from types import SimpleNamespace

import triton

from surgery.kernels.launch import Launch, launches_of
from surgery.kernels.mla_decode.packed_kernel import BLOCK_TOKENS, unpack_launch
from surgery.kernels.split_kv import processors
from surgery.kernels.unpack_rows.reference import unpack_to_pages

PROGRAMS = 16
"""Programs for each multiprocessor: as many of four warps as it holds."""


@launches_of(unpack_to_pages)
def launches(args: SimpleNamespace) -> list[Launch]:
    """Return the launch that fills `latent` and `rope_key`. The programs of a text share the tokens that it has."""
    batch = args.pages.shape[0]
    # A plan of this launch serves all tables whose size has as many bits.
    room = (1 << int(args.pages.shape[1]).bit_length()) * args.rows.shape[1]
    programs = min(triton.cdiv(room, BLOCK_TOKENS), triton.cdiv(PROGRAMS * processors(args.rows.device), batch))
    return [unpack_launch(vars(args), (programs, batch), args.latent, args.rope_key, to_pages=True)]
