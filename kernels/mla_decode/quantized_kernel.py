r"""Absorbed latent attention over quantised tokens, whose numbers are code · scale + zero (fp8: code · scale).

As in `kernel.py`, one program takes `block_rows` query rows and one split of a row's tokens, and reads each byte once.
Tokens that share a byte are taken apart without being put in order: the low bits of a tile of bytes are a tile of
tokens of their own, the next bits another, and the softmax of a step runs over all of them.

**Scales.** A code becomes its number as a tile is loaded, in fp32, and is then rounded to the query's dtype, as the
cache that hands out its tokens would. Where a step lies within one group of tokens (by channel), or a chunk within one
group of channels (by token), its scales are one row or one column, loaded once for the tile. Folding them into queries
and probabilities instead (q · s before the product with codes, p · s before the other) saves no arithmetic at 32 rows
and groups of 32: there are as many numbers in q as in the tile. It would round q · s and p · s instead of c · s.

**What compiling showed** (Triton 3.9, bf16, 32 heads, groups of 32). With WGMMA the numbers are written to shared
memory once and read from there as key and as value: 64 rows, of which half may be padding, take 8-bit codes at r =
256 without spills, by channel and by token. With the MMA of a warp, codes by token are read byte by byte and spill
at 32 rows. By channel 8 bits go up to r = 512 with 32 rows and 8 warps. 4 bits spill at r = 256 in each of the
forms tried, and are left to the reference (`unsupported`).
"""

# ruff: noqa: RUF005 - not every Triton knows starred tuples

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.launch import Config, Launch
from surgery.kernels.mla_decode.kernel import HOPPER_SHARED, chunk_of, rope_block, strides
from surgery.kernels.mla_decode.quantized_reference import BITS, group_size
from surgery.kernels.split_kv import LN2, merge_launch, split_tokens


@triton.jit
def mla_decode_quantized_kernel(
    query,
    codes,
    scales,
    zeros,
    rope_codes,
    rope_scales,
    rope_zeros,
    key_gain,
    out,
    log,
    lengths,
    coded,
    starts,
    scale,
    capacity,
    new_tokens,
    heads,
    heads_per_gain,
    window,
    query_row,
    query_token,
    query_head,
    codes_row,
    codes_token,
    scales_row,
    scales_token,
    zeros_row,
    zeros_token,
    rope_codes_row,
    rope_codes_token,
    rope_scales_row,
    rope_scales_token,
    rope_zeros_row,
    rope_zeros_token,
    key_gain_row,
    key_gain_token,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROPE_CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    GROUP: tl.constexpr,
    ROPE_GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """One program: BLOCK_ROWS query rows against one split of the quantised tokens of one row of the batch."""
    CHUNKS: tl.constexpr = (RANK + CHUNK - 1) // CHUNK
    ROPE_CHUNKS: tl.constexpr = (ROPE + ROPE_CHUNK - 1) // ROPE_CHUNK
    PER_BYTE: tl.constexpr = 8 // BITS
    BLOCK_BYTES: tl.constexpr = BLOCK_TOKENS // PER_BYTE
    dtype = query.dtype.element_ty
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < new_tokens * heads
    new_token, head = row // heads, row % heads
    column, rope_column = tl.arange(0, CHUNK), tl.arange(0, ROPE_CHUNK)

    at = query + batch * query_row + new_token.to(tl.int64) * query_token + head.to(tl.int64) * query_head
    queries, rope_queries, mixed = (), (), ()
    for i in tl.static_range(CHUNKS):
        real_column = real[:, None] & (i * CHUNK + column < RANK)[None, :]
        queries = queries + (tl.load(at[:, None] + (i * CHUNK + column)[None, :], mask=real_column, other=0.0),)
        mixed = mixed + (tl.zeros((BLOCK_ROWS, CHUNK), tl.float32),)
    for i in tl.static_range(ROPE_CHUNKS):
        real_rope = real[:, None] & (i * ROPE_CHUNK + rope_column < ROPE)[None, :]
        rope_at = at[:, None] + (RANK + i * ROPE_CHUNK + rope_column)[None, :]
        rope_queries = rope_queries + (tl.load(rope_at, mask=real_rope, other=0.0),)

    held = capacity if coded is None else tl.minimum(tl.load(coded + batch), capacity)
    length = held if lengths is None else tl.load(lengths + batch)
    position = length - new_tokens + new_token
    low = 0 if starts is None else tl.load(starts + batch)
    first_seen = tl.zeros((BLOCK_ROWS,), tl.int32) + low
    if window is not None:
        first_seen = tl.maximum(first_seen, position - window + 1)
        low = tl.maximum(low, length - new_tokens - window + 1)
    low = tl.maximum(low, 0)
    # Steps begin at multiples of a step, so that one lies within a group of tokens if groups are multiples of it.
    start, stop = split_tokens(
        low // BLOCK_TOKENS * BLOCK_TOKENS, tl.minimum(held, length), split, SPLITS, BLOCK_TOKENS
    )

    most = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    for first in range(start, stop, BLOCK_TOKENS):
        byte = first // PER_BYTE + tl.arange(0, BLOCK_BYTES)
        byte_there = (byte * PER_BYTE < stop) & (byte * PER_BYTE + PER_BYTE > low)
        codes_at = codes + batch * codes_row + byte.to(tl.int64) * codes_token
        rope_codes_at = rope_codes + batch * rope_codes_row + byte.to(tl.int64) * rope_codes_token
        packed, rope_packed = (), ()
        for i in tl.static_range(CHUNKS):
            there = byte_there[:, None]
            if (i + 1) * CHUNK > RANK:
                there = there & (i * CHUNK + column < RANK)[None, :]
            packed = packed + (tl.load(codes_at[:, None] + (i * CHUNK + column)[None, :], mask=there, other=0),)
        for i in tl.static_range(ROPE_CHUNKS):
            there = byte_there[:, None]
            if (i + 1) * ROPE_CHUNK > ROPE:
                there = there & (i * ROPE_CHUNK + rope_column < ROPE)[None, :]
            part = tl.load(rope_codes_at[:, None] + (i * ROPE_CHUNK + rope_column)[None, :], mask=there, other=0)
            rope_packed = rope_packed + (part,)

        tiles, all_logits = (), ()
        highest = most
        for k in tl.static_range(PER_BYTE):
            token = first + k + PER_BYTE * tl.arange(0, BLOCK_BYTES)
            token_there = (token < stop) & (token >= low)
            logits = tl.zeros((BLOCK_ROWS, BLOCK_BYTES), tl.float32)
            for i in tl.static_range(CHUNKS):
                tile = _numbers(
                    packed[i],
                    scales + batch * scales_row,
                    scales_token,
                    zeros if zeros is None else zeros + batch * zeros_row,
                    zeros_token,
                    first,
                    token,
                    token_there,
                    i,
                    RANK,
                    CHUNK,
                    BITS,
                    k,
                    FP8,
                    NATIVE_FP8,
                    BY_CHANNEL,
                    GROUP,
                    BLOCK_TOKENS,
                ).to(dtype)
                tiles = tiles + (tile,)
                logits = tl.dot(queries[i], tl.trans(tile), logits, input_precision="ieee")
            for i in tl.static_range(ROPE_CHUNKS):
                tile = _numbers(
                    rope_packed[i],
                    rope_scales + batch * rope_scales_row,
                    rope_scales_token,
                    rope_zeros if rope_zeros is None else rope_zeros + batch * rope_zeros_row,
                    rope_zeros_token,
                    first,
                    token,
                    token_there,
                    i,
                    ROPE,
                    ROPE_CHUNK,
                    BITS,
                    k,
                    FP8,
                    NATIVE_FP8,
                    False,
                    ROPE_GROUP,
                    BLOCK_TOKENS,
                ).to(dtype)
                logits = tl.dot(rope_queries[i], tl.trans(tile), logits, input_precision="ieee")
            logits *= scale * 1.4426950408889634
            if key_gain is not None:
                gain_at = key_gain + batch * key_gain_row + token.to(tl.int64) * key_gain_token
                gain_there = real[:, None] & token_there[None, :]
                gain = tl.load(gain_at[None, :] + (head // heads_per_gain)[:, None], mask=gain_there, other=0.0)
                logits *= gain.to(tl.float32)
            seen = (token[None, :] <= tl.minimum(position, stop - 1)[:, None]) & (token[None, :] >= first_seen[:, None])
            logits = tl.where(seen, logits, -float("inf"))
            highest = tl.maximum(highest, tl.max(logits, axis=1))
            all_logits = all_logits + (logits,)

        finite = tl.where(highest == -float("inf"), 0.0, highest)  # a row that has seen nothing yet
        decay = tl.exp2(most - finite)
        total = total * decay
        most = highest
        added = ()
        for i in tl.static_range(CHUNKS):
            added = added + (mixed[i] * decay[:, None],)
        mixed = added
        for k in tl.static_range(PER_BYTE):
            weights = tl.exp2(all_logits[k] - finite[:, None])
            total += tl.sum(weights, axis=1)
            weights = weights.to(dtype)
            added = ()
            for i in tl.static_range(CHUNKS):
                added = added + (tl.dot(weights, tiles[k * CHUNKS + i], mixed[i], input_precision="ieee"),)
            mixed = added

    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    index = (batch * new_tokens * heads + row) * SPLITS + split
    for i in tl.static_range(CHUNKS):
        real_column = real[:, None] & (i * CHUNK + column < RANK)[None, :]
        value = (mixed[i] * inverse[:, None]).to(out.dtype.element_ty)
        tl.store(out + index[:, None] * RANK + (i * CHUNK + column)[None, :], value, mask=real_column)
    tl.store(log + index, tl.where(total > 0, (most + tl.log2(total)) * LN2, -float("inf")), mask=real)


@triton.jit
def _numbers(
    packed,
    scales,
    scales_token,
    zeros,
    zeros_token,
    first,
    token,
    there,
    chunk,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BITS: tl.constexpr,
    PLACE: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Tokens [tokens, CHUNK] fp32 of a chunk of bytes: those in the PLACE-th bits of each."""
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    codes = packed if BITS == 8 else (packed >> (PLACE * BITS)) & ((1 << BITS) - 1)
    if not FP8:
        numbers = codes.to(tl.float32)
    elif NATIVE_FP8:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # The bits of e4m3 within those of fp16 are the number, 2^8 times too small.
        wide = codes.to(tl.int16)
        numbers = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    if BY_CHANNEL and GROUP % BLOCK_TOKENS == 0:
        at = first // GROUP * scales_token + column[None, :]
        zero_at = first // GROUP * zeros_token + column[None, :]
        scale_there = (column < WIDTH)[None, :]
    elif BY_CHANNEL:
        at = (token // GROUP).to(tl.int64)[:, None] * scales_token + column[None, :]
        zero_at = (token // GROUP).to(tl.int64)[:, None] * zeros_token + column[None, :]
        scale_there = there[:, None] & (column < WIDTH)[None, :]
    elif GROUP % CHUNK == 0:
        at = token.to(tl.int64)[:, None] * scales_token + chunk * CHUNK // GROUP
        zero_at = token.to(tl.int64)[:, None] * zeros_token + chunk * CHUNK // GROUP
        scale_there = there[:, None]
    else:
        at = token.to(tl.int64)[:, None] * scales_token + (column // GROUP)[None, :]
        zero_at = token.to(tl.int64)[:, None] * zeros_token + (column // GROUP)[None, :]
        scale_there = there[:, None] & (column < WIDTH)[None, :]
    numbers = numbers * tl.load(scales + at, mask=scale_there, other=0.0).to(tl.float32)
    if zeros is not None:
        numbers += tl.load(zeros + zero_at, mask=scale_there, other=0.0).to(tl.float32)
    return numbers


def launches(
    query: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    rope_codes: Tensor,
    rope_scales: Tensor,
    rope_zeros: Tensor | None,
    scale: float,
    format: str,
    group: int,
    by_channel: bool,
    lengths: Tensor | None,
    coded: Tensor | None,
    starts: Tensor | None,
    key_gain: Tensor | None,
    window: int | None,
    *,
    out: Tensor,
    lse: Tensor,
    parts: Tensor | None,
    logs: Tensor | None,
    splits: int,
    config: Config,
    native_fp8: bool,
) -> list[Launch]:
    """The launches that fill `out` [B, T, H, r] and `lse` [B, T, H] fp32, both contiguous.

    Args:
        query … window: as of `mla_decode_quantized`; the last dimension of each is contiguous.
        parts, logs: fp32 scratch [B·T·H, splits, r] and [B·T·H, splits]; unused, and None, at one split.
        native_fp8: whether the GPU converts e4m3 itself (from sm_89 on).
    """
    batch, tokens, heads, _ = query.shape
    rank, rope, bits = codes.shape[-1], rope_codes.shape[-1], BITS[format]
    gains = 0 if key_gain is None else key_gain.shape[-1]
    rope_group = group_size(rope, group)
    arguments = {
        "query": query,
        "codes": codes,
        "scales": scales,
        "zeros": zeros,
        "rope_codes": rope_codes,
        "rope_scales": rope_scales,
        "rope_zeros": rope_zeros,
        "key_gain": key_gain,
        "out": out if splits == 1 else parts,
        "log": lse if splits == 1 else logs,
        "lengths": lengths,
        "coded": coded,
        "starts": starts,
        "scale": float(scale),
        "capacity": codes.shape[1] * 8 // bits,
        "new_tokens": tokens,
        "heads": heads,
        "heads_per_gain": heads // gains if gains else 0,
        "window": window,
        **strides(
            query=query,
            codes=codes,
            scales=scales,
            zeros=zeros,
            rope_codes=rope_codes,
            rope_scales=rope_scales,
            rope_zeros=rope_zeros,
            key_gain=key_gain,
        ),
        "RANK": rank,
        "ROPE": rope,
        "CHUNK": config.chunk,
        "ROPE_CHUNK": chunk_of(rope_group, 64) if rope and rope_group % 16 == 0 else rope_block(rope),
        "BITS": bits,
        "FP8": format == "fp8",
        "NATIVE_FP8": native_fp8,
        "BY_CHANNEL": by_channel,
        "GROUP": group if by_channel else group_size(rank, group),
        "ROPE_GROUP": rope_group,
        "SPLITS": splits,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_TOKENS": config.block_tokens,
    }
    grid = (triton.cdiv(tokens * heads, config.block_rows), splits, batch)
    made = [Launch(mla_decode_quantized_kernel, grid, arguments, config.warps, config.stages)]
    if splits > 1:
        made.append(merge_launch(parts, logs, out.view(-1, rank), lse.view(-1)))
    return made


def default_config(
    rows: int, rank: int, format: str, group: int, by_channel: bool, shared: int = HOPPER_SHARED
) -> Config:
    """The configuration to begin with, by what compiling showed; arguments as in `kernel.default_config`."""
    if by_channel and rank > 256:
        block_rows, warps = 16 if rows <= 16 else 32, 8
    elif shared >= HOPPER_SHARED:
        # WGMMA reads tiles from shared memory, which are then written there once; rows beyond the heads cost nothing.
        block_rows, warps = 64, 4 if by_channel else 8
    else:
        block_rows, warps = (16 if rows <= 16 or not by_channel else 32), 4
    chunk = 64 if by_channel else chunk_of(group_size(rank, group), 64)
    return Config(block_rows, max(32, 16 * 8 // BITS[format]), chunk, None, warps, 3)


def unsupported(rank: int, format: str, group: int, by_channel: bool, dtype: torch.dtype) -> str | None:
    """Why no GPU is given this: the compiled program spills, or was not looked at; None if neither."""
    if BITS[format] < 8:
        return f"the kernel for {format} needs more registers than there are"
    if rank > (512 if by_channel else 256):
        return f"the kernel for a rank of {rank} quantised by {'channel' if by_channel else 'token'} spills registers"
    if group % 32 or (not by_channel and group_size(rank, group) % 32):
        return f"the kernel wants groups that are multiples of 32, not {group}"
    return "no kernel for fp32 queries over codes" if dtype == torch.float32 else None
