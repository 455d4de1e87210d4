r"""MLA decode attention over packed rows: a kernel unpacks them into scratch memory, which `mla_decode` then reads.

A row is read as lanes of 16 bits, two bytes with the same fields; lanes and masks come from a table of slots
(`row_slots.py`), so that one kernel unpacks rows of all bit patterns. With step s and mean m, channel j of b bits with
code c is s·(c - (2^b - 1)/2) + m. Shared keys are rotated to their positions. The first tokens, which the cache holds
in full precision, replace their unpacked values. Only tokens that a query sees are unpacked.

The scratch memory holds the tokens of one layer in the query's dtype during a call. Attention that unpacks in registers
reads fewer bytes but was slower on an H100: 16-bit gathers, a product for each byte of a lane, and register pressure
(docs/kernels.md has the figures).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.launch import Config, Launch, launches_of, size, strides
from surgery.kernels.lowrank_decode.kernel import turned
from surgery.kernels.lowrank_decode.reference import STEP
from surgery.kernels.mla_decode import kernel as dense
from surgery.kernels.mla_decode.packed_reference import packed_latent_attention
from surgery.kernels.mla_decode.row_slots import channels_of, row_bytes, slot_table

CHUNK, BLOCK_TOKENS = 32, 32
"""Slots and tokens that a program unpacks per iteration."""


@launches_of(packed_latent_attention)
def launches(args: SimpleNamespace, *, out: Tensor, lse: Tensor, config: Config | None = None) -> list[Launch]:
    """Return the launches that fill `out` [B, T, H, v] and `lse` [B, T, H] fp32, both contiguous.

    Args:
        args: arguments of `mla_decode_packed`; the last dimension of each is contiguous.
        config: configuration of `mla_decode`.
    """
    query, rows, pages = args.query, args.rows, args.pages
    batch, rope_dim = query.shape[0], channels_of(args.fields) - args.rank
    gains = rows.shape[-1] - row_bytes(args.fields) // 2
    page = 0 if pages is None else rows.shape[1]
    text = rows if pages is None else pages
    # A plan serves all sequences whose capacity has the same bit length, so allocate for the longest.
    room = (1 << int(text.shape[1]).bit_length()) * max(page, 1)
    latent = query.new_empty(batch, room, query.shape[-1] - rope_dim)
    rope_key = query.new_empty(batch, room, rope_dim)
    key_gain = query.new_empty(batch, room, gains, dtype=torch.float32) if gains else None
    unpack = unpack_launch(vars(args), (triton.cdiv(room, BLOCK_TOKENS), batch), latent, rope_key, key_gain)
    unpack = replace(unpack, scratch=(latent, rope_key) if key_gain is None else (latent, rope_key, key_gain))
    read = dense.launches(
        query, latent, rope_key, args.scale, args.lengths, args.starts, None, key_gain, out=out, lse=lse, config=config
    )
    if pages is None:
        # The scratch memory has more slots than the cache has tokens.
        read[0] = replace(read[0], arguments=read[0].arguments | {"capacity": size(rows, 1)})
    return [unpack, *read]


def unpack_launch(
    args: Mapping[str, Any],
    grid: tuple[int, int],
    latent: Tensor,
    rope_key: Tensor,
    key_gain: Tensor | None = None,
    *,
    to_pages: bool = False,
) -> Launch:
    """Return the launch that unpacks rows.

    Args:
        args: arguments of `mla_decode_packed` by name.
        grid: programs that share the tokens of one row of the batch, and number of rows.
        latent, rope_key, key_gain: output memory for the tokens of each row, or of each page. A latent that is wider
            than that of a row has the shared key before its rotation too.
        to_pages: unpack each token to its page instead of its row of the batch.
    """
    rows, pages, exact, begins = args["rows"], args["pages"], args["exact"], args["begins"]
    pairs, gains = rope_key.shape[-1] // 2, 0 if key_gain is None else key_gain.shape[-1]
    rank = channels_of(args["fields"]) - 2 * pairs
    defaults = dict.fromkeys(("lengths", "starts", "exact_starts"))
    return Launch.of(
        unpack_rows_kernel,
        grid,
        Config(warps=4, stages=1),
        defaults | args,
        latent=latent,
        rope_key=rope_key,
        key_gain=key_gain,
        entries=slot_table(args["fields"], rank, CHUNK, rows.device),
        begin_rows=0 if begins is None else size(begins, 1),
        capacity=size(rows if pages is None else pages, 1),
        first_tokens=0 if exact is None else exact.shape[1],
        gain_lane=row_bytes(args["fields"]) // 2,
        **strides("row", "token", rows=rows, exact=exact, latent=latent, rope_key=rope_key, key_gain=key_gain),
        **strides("row", pages=pages),
        RANK=rank,
        PAIRS=pairs,
        WITH_KEYS=latent.shape[-1] > rank,
        GAINS=gains,
        GAIN_BLOCK=triton.next_power_of_2(max(gains, 1)),
        PLANES=triton.cdiv(rank // 2, CHUNK),
        ROPE_PLANES=triton.cdiv(pairs, CHUNK),
        CHUNK=CHUNK,
        PAGE=0 if pages is None else rows.shape[1],
        TO_PAGES=to_pages,
        STEP=STEP,
        BLOCK_TOKENS=BLOCK_TOKENS,
    )


# These grow with the sequence; specialization would recompile the kernel.
@triton.jit(do_not_specialize=["capacity", "begin_rows", "pages_row"])
def unpack_rows_kernel(
    rows, step, mean, entries, within, begins, exact, latent, rope_key, key_gain, lengths, starts, exact_starts, pages,
    capacity, begin_rows, first_tokens, gain_lane, rows_row, rows_token, exact_row, exact_token,
    latent_row, latent_token, rope_key_row, rope_key_token, key_gain_row, key_gain_token, pages_row,
    RANK: tl.constexpr, PAIRS: tl.constexpr, WITH_KEYS: tl.constexpr, GAINS: tl.constexpr, GAIN_BLOCK: tl.constexpr,
    PLANES: tl.constexpr, ROPE_PLANES: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr, TO_PAGES: tl.constexpr,
    STEP: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Unpack every nth block of BLOCK_TOKENS visible tokens of one row of the batch, for n programs per row."""
    batch = tl.program_id(1).to(tl.int64)
    if PAGE > 0:
        capacity *= PAGE
    length = capacity if lengths is None else tl.minimum(tl.load(lengths + batch), capacity)
    low = 0 if starts is None else tl.load(starts + batch)
    block = low // BLOCK_TOKENS + tl.program_id(0)
    for start in range(block * BLOCK_TOKENS, length, tl.num_programs(0) * BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        mask = token < length
        if PAGE > 0:
            base = tl.load(pages + batch * pages_row + token // PAGE, mask=mask, other=0).to(tl.int64)
            token_index = (token % PAGE).to(tl.int64)
        else:
            base = batch
            token_index = token.to(tl.int64)
        rows_at = rows + base * rows_row + token_index * rows_token
        first_token = 0 if exact_starts is None else tl.load(exact_starts + batch)
        nth = token - first_token
        is_first = mask & (nth >= 0) & (nth < first_tokens)
        has_first = (start < first_token + first_tokens) & (start + BLOCK_TOKENS > first_token)
        to_row, to_token = batch, token.to(tl.int64)
        if TO_PAGES:
            to_row, to_token = base, token_index

        for i in range(PLANES):
            slot = i * CHUNK + tl.arange(0, CHUNK)
            near, far = values_of(rows_at, entries + i * CHUNK, step, mean, slot, mask, CHUNK)
            if has_first:
                near, far = with_first(near, far, exact, batch, nth, is_first, slot, RANK // 2, exact_row, exact_token)
            to = latent + to_row * latent_row + to_token * latent_token
            store_pairs(to[:, None], near, far, i, mask, RANK, BLOCK_TOKENS, CHUNK)
        for i in range(ROPE_PLANES):
            pair = i * CHUNK + tl.arange(0, CHUNK)
            near, far = values_of(rows_at, entries + (PLANES + i) * CHUNK, step, mean, RANK // 2 + pair, mask, CHUNK)
            if has_first:
                near, far = with_first(
                    near, far, exact, batch, nth, is_first, RANK // 2 + pair, RANK // 2 + PAIRS, exact_row, exact_token
                )
            if WITH_KEYS:
                to = latent + RANK + to_row * latent_row + to_token * latent_token
                store_pairs(to[:, None], near, far, i, mask, 2 * PAIRS, BLOCK_TOKENS, CHUNK)
            near, far = turned(near, far, within, STEP, token % STEP, pair, pair < PAIRS, PAIRS)
            near, far = turned(near, far, begins, begin_rows, token // STEP, pair, pair < PAIRS, PAIRS)
            to = rope_key + to_row * rope_key_row + to_token * rope_key_token
            store_pairs(to[:, None], near, far, i, mask, 2 * PAIRS, BLOCK_TOKENS, CHUNK)
        if GAINS > 0:
            gain = tl.arange(0, GAIN_BLOCK)
            gain_mask = mask[:, None] & (gain < GAINS)[None, :]
            gains = tl.load(rows_at[:, None] + (gain_lane + gain)[None, :], mask=gain_mask, other=0)
            to = key_gain + to_row * key_gain_row + to_token * key_gain_token
            tl.store(to[:, None] + gain[None, :], gains.to(tl.float16, bitcast=True), mask=gain_mask)


@triton.jit
def values_of(rows_at, entries, step, mean, slot, mask, CHUNK: tl.constexpr):
    """Dequantize both channels of slots of packed rows: two fp32 [tokens, CHUNK]."""
    entry = tl.load(entries + tl.arange(0, CHUNK))
    inside, masks = entry >= 0, entry & 255
    at = rows_at[:, None] + (entry >> 8)[None, :]
    lanes = tl.load(at, mask=mask[:, None] & inside[None, :], other=0).to(tl.int32) & 0xFFFF
    # The masked byte is c · 2^p; 2^p is the lowest bit of its mask.
    unit = (masks & -masks).to(tl.float32)
    half = 0.5 * (masks.to(tl.float32) / unit)
    step_near = tl.load(step + 2 * slot, mask=inside, other=0.0)
    step_far = tl.load(step + 2 * slot + 1, mask=inside, other=0.0)
    mean_near = tl.load(mean + 2 * slot, mask=inside, other=0.0)
    mean_far = tl.load(mean + 2 * slot + 1, mask=inside, other=0.0)
    near = (lanes & masks[None, :]).to(tl.float32) / unit[None, :] - half[None, :]
    far = ((lanes >> 8) & masks[None, :]).to(tl.float32) / unit[None, :] - half[None, :]
    return near * step_near[None, :] + mean_near[None, :], far * step_far[None, :] + mean_far[None, :]


@triton.jit
def with_first(near, far, exact, batch, nth, is_first, slot, slots, exact_row, exact_token):
    """Replace the unpacked values of the first tokens by their full-precision ones."""
    at = exact + batch * exact_row + nth[:, None].to(tl.int64) * exact_token + (2 * slot)[None, :]
    first_mask = is_first[:, None] & (slot < slots)[None, :]
    first_near = tl.load(at, mask=first_mask, other=0.0).to(tl.float32)
    first_far = tl.load(at + 1, mask=first_mask, other=0.0).to(tl.float32)
    return tl.where(is_first[:, None], first_near, near), tl.where(is_first[:, None], first_far, far)


@triton.jit
def store_pairs(to, near, far, plane, mask, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr, CHUNK: tl.constexpr):
    """Store both channels of a plane's slots as neighboring elements."""
    both = tl.reshape(tl.join(near, far), (BLOCK_TOKENS, 2 * CHUNK)).to(to.dtype.element_ty)
    channel = plane * 2 * CHUNK + tl.arange(0, 2 * CHUNK)
    tl.store(to + channel[None, :], both, mask=mask[:, None] & (channel < WIDTH)[None, :])
