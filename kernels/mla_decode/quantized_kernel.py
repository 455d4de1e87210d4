r"""Absorbed latent attention over quantized tokens, whose numbers are code · scale + zero (fp8: code · scale).

As in `kernel.py`, one program takes `block_rows` query rows and one split of a row's tokens, here with tokens on the
rows of all products: those are then matrix instructions of a warp group for 16 and 32 heads too, and accumulators
[r, rows] have no padding. Tokens that share a byte are taken apart and stand in order again before a product.

**Dequantized twice.** As keys and as values a step's tokens are loaded and dequantized anew, a chunk of the rank at a
time; the second time they come from a cache of the GPU. Held from one product to the other, as `kernel.py` holds exact
ones, they stay in registers (64 tokens of r = 512 are a quarter of the register file) and spilled in every form tried.
That the loop over keys is not unrolled keeps the compiler from merging the two. The price is arithmetic: some ten
operations a number, which limit int8 on an H200 to about two thirds of its memory's rate (counted, not measured).

**Scales.** A code becomes its number in fp32, and is then rounded to the query's dtype, as the cache that hands out its
tokens would. A group's scale is loaded once for a chunk of a step and spread over the group in registers, where groups
and steps divide each other, else once a number. Folding scales into queries and probabilities instead (q · s before the
product with quantized values, p · s before the other) saves no arithmetic at 32 rows and groups of 32: there are as
many numbers in q as in the tile. It would round q · s and p · s instead of c · s.

**What compiling showed** (Triton 3.9, bf16, groups of 32). On sm_90 32 rows and on sm_80 16 do without spills in every
format, by channel and by token: 4 warps up to r = 256, 8 up to r = 512.
"""

# ruff: noqa: RUF005 - not every Triton knows starred tuples

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.launch import Config, Launch, launches_of, size, strides
from surgery.kernels.mla_decode.kernel import HOPPER_SHARED, rope_block, shared_limit
from surgery.kernels.mla_decode.quantized_reference import quantized_latent_attention
from surgery.kernels.online_softmax import LOG2E, log_of, softmax_step
from surgery.kernels.quantization import BITS, group_size
from surgery.kernels.split_kv import scratch, split_tokens, splits_of, with_merge
from surgery.kernels.tuned import key_of, tuned


# These grow with a text: not worth a compilation each.
@triton.jit(do_not_specialize=["capacity", "splits", "key_gain_row"])
def mla_decode_quantized_kernel(
    query, codes, scales, zeros, rope_codes, rope_scales, rope_zeros, key_gain, out, log, lengths, coded, starts, scale,
    capacity, splits, new_tokens, heads, heads_per_gain, window, query_row, query_token, query_head, codes_row,
    codes_token, scales_row, scales_token, zeros_row, zeros_token, rope_codes_row, rope_codes_token, rope_scales_row,
    rope_scales_token, rope_zeros_row, rope_zeros_token, key_gain_row, key_gain_token,
    RANK: tl.constexpr, ROPE: tl.constexpr, CHUNK: tl.constexpr, ROPE_CHUNK: tl.constexpr, BITS: tl.constexpr,
    FP8: tl.constexpr, NATIVE_FP8: tl.constexpr, BY_CHANNEL: tl.constexpr, GROUP: tl.constexpr,
    ROPE_GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS query rows against one split of the quantized tokens of one row of the batch."""
    CHUNKS: tl.constexpr = (RANK + CHUNK - 1) // CHUNK
    ROPE_CHUNKS: tl.constexpr = (ROPE + ROPE_CHUNK - 1) // ROPE_CHUNK
    dtype = query.dtype.element_ty
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < new_tokens * heads
    new_token, head = row // heads, row % heads
    column, rope_column = tl.arange(0, CHUNK), tl.arange(0, ROPE_CHUNK)
    query_at = query + batch * query_row + new_token.to(tl.int64) * query_token + head.to(tl.int64) * query_head
    codes += batch * codes_row
    scales += batch * scales_row
    rope_codes += batch * rope_codes_row
    rope_scales += batch * rope_scales_row
    if zeros is not None:
        zeros += batch * zeros_row
        rope_zeros += batch * rope_zeros_row

    capacity *= 8 // BITS
    num_coded = capacity if coded is None else tl.minimum(tl.load(coded + batch), capacity)
    length = num_coded if lengths is None else tl.load(lengths + batch)
    position = length - new_tokens + new_token
    low = 0 if starts is None else tl.load(starts + batch)
    first_seen = tl.zeros((BLOCK_ROWS,), tl.int32) + low
    if window is not None:
        first_seen = tl.maximum(first_seen, position - window + 1)
        low = tl.maximum(low, length - new_tokens - window + 1)
    low = tl.maximum(low, 0)
    # Steps begin at multiples of a step, so that one begins with a byte, and lies within a group if groups are longer.
    start, stop = split_tokens(
        low // BLOCK_TOKENS * BLOCK_TOKENS, tl.minimum(num_coded, length), split, splits, BLOCK_TOKENS
    )

    m_i = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    l_i = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = ()
    for _ in tl.static_range(CHUNKS):
        acc = acc + (tl.zeros((CHUNK, BLOCK_ROWS), tl.float32),)
    for first in range(start, stop, BLOCK_TOKENS):
        logits = tl.zeros((BLOCK_TOKENS, BLOCK_ROWS), tl.float32)
        for i in range(CHUNKS):
            load_mask = real[:, None] & (i * CHUNK + column < RANK)[None, :]
            part = tl.load(query_at[:, None] + (i * CHUNK + column)[None, :], mask=load_mask, other=0.0)
            tile = numbers(
                codes, codes_token, scales, scales_token, zeros, zeros_token, first, low, stop, i,
                RANK, CHUNK, BITS, FP8, NATIVE_FP8, BY_CHANNEL, GROUP, BLOCK_TOKENS,
            )  # fmt: skip
            logits = tl.dot(tile.to(dtype), tl.trans(part), logits, input_precision="ieee")
        for i in tl.static_range(ROPE_CHUNKS):
            load_mask = real[:, None] & (i * ROPE_CHUNK + rope_column < ROPE)[None, :]
            part = tl.load(
                query_at[:, None] + (RANK + i * ROPE_CHUNK + rope_column)[None, :], mask=load_mask, other=0.0
            )
            tile = numbers(
                rope_codes, rope_codes_token, rope_scales, rope_scales_token, rope_zeros, rope_zeros_token, first, low,
                stop, i, ROPE, ROPE_CHUNK, BITS, FP8, NATIVE_FP8, False, ROPE_GROUP, BLOCK_TOKENS,
            )  # fmt: skip
            logits = tl.dot(tile.to(dtype), tl.trans(part), logits, input_precision="ieee")

        token = first + tl.arange(0, BLOCK_TOKENS)
        logits *= scale * LOG2E
        if key_gain is not None:
            gain_at = key_gain + batch * key_gain_row + token.to(tl.int64) * key_gain_token
            load_mask = real[None, :] & ((token < stop) & (token >= low))[:, None]
            gain = tl.load(gain_at[:, None] + (head // heads_per_gain)[None, :], mask=load_mask, other=0.0)
            logits *= gain.to(tl.float32)
        mask = (token[:, None] <= tl.minimum(position, stop - 1)[None, :]) & (token[:, None] >= first_seen[None, :])
        logits = tl.where(mask, logits, -float("inf"))

        weights, m_i, l_i, alpha = softmax_step(logits, m_i, l_i, 0)
        weights = weights.to(dtype)
        new_acc = ()
        for i in tl.static_range(CHUNKS):
            tile = numbers(
                codes, codes_token, scales, scales_token, zeros, zeros_token, first, low, stop, i,
                RANK, CHUNK, BITS, FP8, NATIVE_FP8, BY_CHANNEL, GROUP, BLOCK_TOKENS,
            )  # fmt: skip
            values = tl.trans(tile.to(dtype))
            new_acc = new_acc + (tl.dot(values, weights, acc[i] * alpha[None, :], input_precision="ieee"),)
        acc = new_acc

    inverse = 1.0 / tl.where(l_i > 0, l_i, 1.0)
    index = (batch * new_tokens * heads + row) * splits + split
    for i in tl.static_range(CHUNKS):
        load_mask = real[None, :] & (i * CHUNK + column < RANK)[:, None]
        value = (acc[i] * inverse[None, :]).to(out.dtype.element_ty)
        tl.store(out + index[None, :] * RANK + (i * CHUNK + column)[:, None], value, mask=load_mask)
    tl.store(log + index, log_of(m_i, l_i), mask=real)


@triton.jit
def numbers(
    codes, codes_token, scales, scales_token, zeros, zeros_token, first, low, stop, chunk,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BITS: tl.constexpr, FP8: tl.constexpr, NATIVE_FP8: tl.constexpr,
    BY_CHANNEL: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers [BLOCK, CHUNK] fp32 of a chunk of the tokens from `first` on; of those outside of low … stop finite."""
    PER_BYTE: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = BLOCK // PER_BYTE
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    byte = first // PER_BYTE + tl.arange(0, BYTES)
    load_mask = ((byte * PER_BYTE < stop) & (byte * PER_BYTE + PER_BYTE > low))[:, None]
    if WIDTH % CHUNK != 0:
        load_mask = load_mask & (column < WIDTH)[None, :]
    tile = tl.load((codes + byte.to(tl.int64) * codes_token)[:, None] + column[None, :], mask=load_mask, other=0)
    if BITS == 4:
        tile = tl.join(tile & 15, tile >> 4)
    elif BITS == 2:
        # Joined last, bit 1 of a place in its byte goes before bit 0.
        tile = tl.join(tl.join(tile & 3, (tile >> 4) & 3), tl.join((tile >> 2) & 3, tile >> 6))
        tile = tl.reshape(tile, (BYTES, CHUNK, PER_BYTE))
    if BITS < 8:
        tile = tl.reshape(tl.permute(tile, (0, 2, 1)), (BLOCK, CHUNK))

    # The arithmetic of `gqa_decode_quantized` would be a tenth more instructions here: the codes are apart already.
    if not FP8:
        values = tile.to(tl.float32)
    elif NATIVE_FP8:
        values = tile.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # The bits of e4m3 within those of fp16 are the number, 2^8 times too small.
        wide = tile.to(tl.int16)
        values = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    values *= spread(scales, scales_token, first, low, stop, chunk, WIDTH, CHUNK, BY_CHANNEL, GROUP, BLOCK)
    if zeros is not None:
        values += spread(zeros, zeros_token, first, low, stop, chunk, WIDTH, CHUNK, BY_CHANNEL, GROUP, BLOCK)
    return values


@triton.jit
def spread(
    scales, scales_token, first, low, stop, chunk, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    BY_CHANNEL: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scale of each number, [BLOCK, CHUNK] fp32 or what broadcasts to it; 0 of tokens outside of low … stop."""
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (column < WIDTH)[None, :]
    token = first + tl.arange(0, BLOCK)
    token_mask = ((token < stop) & (token >= low))[:, None]
    if BY_CHANNEL and GROUP % BLOCK == 0:
        at = scales + first // GROUP * scales_token
        factor = tl.load(at + column[None, :], mask=inside, other=0.0).to(tl.float32)
    elif BY_CHANNEL and BLOCK % GROUP == 0:
        GROUPS: tl.constexpr = BLOCK // GROUP
        group = first // GROUP + tl.arange(0, GROUPS)
        group_mask = ((group * GROUP < stop) & (group * GROUP + GROUP > low))[:, None]
        at = (scales + group.to(tl.int64) * scales_token)[:, None]
        factor = tl.load(at + column[None, :], mask=group_mask & inside, other=0.0).to(tl.float32)
        factor = tl.reshape(tl.broadcast_to(factor[:, None, :], (GROUPS, GROUP, CHUNK)), (BLOCK, CHUNK))
    elif BY_CHANNEL:
        at = (scales + (token // GROUP).to(tl.int64) * scales_token)[:, None]
        factor = tl.load(at + column[None, :], mask=token_mask & inside, other=0.0).to(tl.float32)
    elif GROUP % CHUNK == 0:
        at = (scales + token.to(tl.int64) * scales_token)[:, None]
        factor = tl.load(at + chunk * CHUNK // GROUP, mask=token_mask, other=0.0).to(tl.float32)
    elif CHUNK % GROUP == 0:
        PARTS: tl.constexpr = CHUNK // GROUP
        part = chunk * PARTS + tl.arange(0, PARTS)
        at = (scales + token.to(tl.int64) * scales_token)[:, None]
        factor = tl.load(at + part[None, :], mask=token_mask & (part * GROUP < WIDTH)[None, :], other=0.0).to(
            tl.float32
        )
        factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (BLOCK, PARTS, GROUP)), (BLOCK, CHUNK))
    else:
        at = (scales + token.to(tl.int64) * scales_token)[:, None]
        factor = tl.load(at + (column // GROUP)[None, :], mask=token_mask & inside, other=0.0).to(tl.float32)
    return factor


@launches_of(quantized_latent_attention)
def launches(
    args: SimpleNamespace, *, out: Tensor, lse: Tensor, config: Config | None = None, native_fp8: bool | None = None
) -> list[Launch]:
    """The launches that fill `out` [B, T, H, r] and `lse` [B, T, H] fp32, both contiguous.

    Args:
        args: arguments of `mla_decode_quantized`; the last dimension of each is contiguous.
        native_fp8: whether the GPU converts e4m3 itself, as from sm_89 on; None asks it.
    """
    query, codes, rope_codes, key_gain = args.query, args.codes, args.rope_codes, args.key_gain
    format, group, by_channel = args.format, args.group, args.by_channel
    batch, tokens, heads, _ = query.shape
    rank, rope, bits = codes.shape[-1], rope_codes.shape[-1], BITS[format]
    gains = 0 if key_gain is None else key_gain.shape[-1]
    if config is None:
        by = "channel" if by_channel else "token"
        shape = key_of(heads=tokens * heads, rank=rank, rope=rope, format=format, by=by, group=group, dtype=query.dtype)
        default = default_config(tokens * heads, rank, shared_limit(query.device))
        config = tuned("mla_decode_quantized", shape, query.device, default)
    if native_fp8 is None:
        native_fp8 = query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) >= (8, 9)
    capacity, blocks = codes.shape[1] * 8 // bits, triton.cdiv(tokens * heads, config.block_rows)
    splits = splits_of(config, batch * blocks, query, capacity, args.window)
    parts, logs = scratch(query, rank, splits)
    rope_scales = args.rope_scales
    launch = Launch.of(
        mla_decode_quantized_kernel,
        (blocks, splits, batch),
        config,
        vars(args),
        out=out if parts is None else parts,
        log=lse if logs is None else logs,
        scale=float(args.scale),
        capacity=size(codes, 1),
        splits=splits,
        new_tokens=tokens,
        heads=heads,
        heads_per_gain=heads // gains if gains else 0,
        **strides("row", "token", "head", query=query),
        **strides("row", "token", codes=codes, scales=args.scales, zeros=args.zeros, key_gain=key_gain),
        **strides("row", "token", rope_codes=rope_codes, rope_scales=rope_scales, rope_zeros=args.rope_zeros),
        RANK=rank,
        ROPE=rope,
        CHUNK=config.chunk,
        ROPE_CHUNK=min(64, rope_block(rope)),
        BITS=bits,
        FP8=format == "fp8",
        NATIVE_FP8=native_fp8,
        BY_CHANNEL=by_channel,
        GROUP=group if by_channel else group_size(rank, args.scales.shape[-1]),
        ROPE_GROUP=group_size(rope, rope_scales.shape[-1]),
        BLOCK_ROWS=config.block_rows,
        BLOCK_TOKENS=config.block_tokens,
    )
    return with_merge(launch, parts, logs, out, lse)


def default_config(rows: int, rank: int, shared: int = HOPPER_SHARED) -> Config:
    """The configuration to begin with, by what compiling showed; arguments as in `kernel.default_config`."""
    block_rows = 32 if rows > 16 and shared >= HOPPER_SHARED else 16
    return Config(block_rows, 64, min(64, rope_block(rank)), None, 8 if rank > 256 else 4, 3)


def unsupported(rank: int, group: int, by_channel: bool, dtype: torch.dtype) -> str | None:
    """Return why no GPU runs this: the compiled program spills, or was not checked; None if neither."""
    if rank > 512:
        return f"the kernel for quantized tokens of a rank of {rank} was not looked at above 512"
    if group % 32 or (not by_channel and group_size(rank, -(-rank // group)) % 32):
        return f"the kernel wants groups that are multiples of 32, not {group}"
    return "no kernel for fp32 queries over codes" if dtype == torch.float32 else None
