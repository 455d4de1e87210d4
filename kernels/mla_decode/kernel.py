r"""Split-KV decode attention of absorbed MLA: all query heads read the same latent cache.

    logit = scale · ⟨q, [c ; k]⟩ · gain        out = Σ softmax(logit) c        (DeepSeek-V2, arXiv 2405.04434, app. C)

One program takes `block_rows` query rows, which are (new token, head) pairs, and one split of a row's tokens. It loads
each latent once, row-major as it is cached, and uses it as the value and, transposed in shared memory, as the key. The
latent is cut into equal chunks with an accumulator each, so that a rank need be no power of two: 320 is 5 · 64, 448 is
7 · 64. If no chunk divides the rank, the last chunk is masked.

**Memory traffic** is dominated by the latent: r + ρ elements per token, for H · T rows. Up to `block_rows` rows it is
read once from memory. With more rows, blocks of rows are the fastest axis of the grid: programs that read the same
tokens are scheduled together, and all but one hit the L2 cache. DRAM traffic stays that of one read; L2 traffic is
H · T / `block_rows` times as much. With 64 rows per block one read serves 64 heads.

**Compiled code** (Triton 3.9, bf16). Heads are the rows of the product. 16 and 32 rows use the MMA of a warp, 64
Hopper's WGMMA. With tokens as rows (transposed products) WGMMA supports 16 heads too, but keeps a third copy of each
tile in shared memory, which does not fit next to 512 + 64 elements per token, and takes 255 registers. With two stages
Triton fetches a tile only after the previous one was used; three stages overlap, and are the default if they fit.
"""

# ruff: noqa: RUF005 - not every Triton supports starred tuples

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.launch import Config, Launch, launches_of, size, strides
from surgery.kernels.mla_decode.reference import ragged_latent_attention
from surgery.kernels.online_softmax import LOG2E, log_of, softmax_step
from surgery.kernels.split_kv import scratch, split_tokens, splits_of, with_merge

HOPPER_SHARED = 227 * 1024
"""Bytes of shared memory of one program on sm_90; the default without a CUDA device."""


def default_config(
    rows: int,
    rank: int,
    rope: int,
    dtype: torch.dtype,
    shared: int = HOPPER_SHARED,
    *,
    paged: bool = False,
    gains: bool = False,
) -> Config:
    """Return the widest default tiling that fits into shared memory and compiles without spills.

    Args:
        rows: query rows, T · H.
        rank, rope, dtype: r, ρ and the inputs' dtype.
        shared: bytes of shared memory per program; at least Hopper's size implies WGMMA.
        paged: whether the cache has a page table.
        gains: whether logits have key gains, which take registers too.
    """
    # 64 rows pay off only with WGMMA: with the MMA of a warp their accumulators leave too few registers.
    wide = shared >= HOPPER_SHARED and dtype != torch.float32
    block_rows = 16 if rows <= 16 else 64 if rows > 32 and wide else 32
    # Pages and gains together leave four warps too few registers.
    crowded = paged and gains and block_rows * rank >= 32 * 256
    warps = 8 if block_rows == 64 or dtype == torch.float32 or crowded else 4
    chunk = chunk_of(rank, 32 if dtype == torch.float32 else 256 if block_rows * rank >= 64 * 512 else 64)
    # Page addresses and gains take registers too.
    is_wide_row = gains or block_rows * rank > (32 * 256 if paged else 32 * 448)
    max_tokens = 16 if dtype == torch.float32 else 32 if is_wide_row else 64
    for tokens, depth in ((max_tokens, 2), (min(max_tokens, 32), 2), (16, 2), (16, 1)):
        # With a page table Triton counts every stage twice.
        config = Config(block_rows, tokens, chunk, None, warps, 1 + depth * (1 + paged))
        if shared_bytes(config, rank, rope, dtype.itemsize, paged=paged) <= shared:
            break
    return config


def chunk_of(rank: int, max_chunk: int) -> int:
    """Return the widest power of 2 up to `max_chunk` that gives at most 16 equal chunks, or else one with a mask."""
    for chunk in (256, 128, 64, 32, 16):
        if chunk <= max_chunk and rank % chunk == 0 and rank <= 16 * chunk:
            return chunk
    return min(max_chunk, max(16, triton.next_power_of_2(rank)))


def shared_bytes(config: Config, rank: int, rope: int, itemsize: int, *, paged: bool = False) -> int:
    """Estimate the bytes of shared memory of a program: queries, tile buffers and softmax weights."""
    width = triton.cdiv(rank, config.chunk) * config.chunk + (rope_block(rope) if rope else 0)
    buffers = (config.stages - 1) // (1 + paged) + (config.block_rows >= 64)  # WGMMA reads one while two are filled
    tiles = (config.block_rows + buffers * config.block_tokens) * width
    return itemsize * (tiles + config.block_rows * config.block_tokens) + 2048


def rope_block(rope: int) -> int:
    """Return the width of the tile for ρ rotary elements."""
    return max(16, triton.next_power_of_2(rope))


def shared_limit(device: torch.device) -> int:
    """Return the maximum bytes of shared memory per program on a device."""
    if device.type != "cuda":
        return HOPPER_SHARED
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@launches_of(ragged_latent_attention)
def launches(args: SimpleNamespace, *, out: Tensor, lse: Tensor, config: Config | None = None) -> list[Launch]:
    """Return the launches that fill `out` [B, T, H, r] and `lse` [B, T, H] fp32, both contiguous.

    `args` are those of `mla_decode`, each tensor with a contiguous last dimension.
    """
    query, latent, rope_key, pages = args.query, args.latent, args.rope_key, args.pages
    batch, tokens, heads, _ = query.shape
    rank, rope = latent.shape[-1], rope_key.shape[-1]
    gains = 0 if args.key_gain is None else args.key_gain.shape[-1]
    page = 0 if pages is None else latent.shape[1]
    capacity = latent.shape[1] if pages is None else pages.shape[1] * page
    if config is None:
        needs = {"paged": page > 0, "gains": gains > 0}
        config = default_config(tokens * heads, rank, rope, query.dtype, shared_limit(query.device), **needs)
    blocks = triton.cdiv(tokens * heads, config.block_rows)
    splits = splits_of(config, batch * blocks, query, capacity)
    parts, logs = scratch(query, rank, splits)
    launch = Launch.of(
        mla_decode_kernel,
        (blocks, splits, batch),
        config,
        vars(args),
        rope_key=rope_key if rope else None,
        out=out if parts is None else parts,
        log=lse if logs is None else logs,
        scale=float(args.scale),
        capacity=size(latent if pages is None else pages, 1),
        splits=splits,
        new_tokens=tokens,
        heads=heads,
        heads_per_gain=heads // gains if gains else 0,
        **strides("row", "token", "head", query=query),
        **strides("row", "token", latent=latent, rope_key=rope_key, key_gain=args.key_gain),
        **strides("row", pages=pages),
        RANK=rank,
        ROPE=rope,
        CHUNK=config.chunk,
        ROPE_BLOCK=rope_block(rope),
        PAGE=page,
        BLOCK_ROWS=config.block_rows,
        BLOCK_TOKENS=config.block_tokens,
    )
    return with_merge(launch, parts, logs, out, lse)


# These grow with the sequence; specialization would recompile the kernel.
@triton.jit(do_not_specialize=["capacity", "splits", "key_gain_row", "pages_row"])
def mla_decode_kernel(
    query, latent, rope_key, key_gain, out, log, lengths, starts, pages, scale, capacity, splits, new_tokens,
    heads, heads_per_gain, query_row, query_token, query_head, latent_row, latent_token, rope_key_row,
    rope_key_token, key_gain_row, key_gain_token, pages_row,
    RANK: tl.constexpr, ROPE: tl.constexpr, CHUNK: tl.constexpr, ROPE_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Attend from BLOCK_ROWS query rows over one split of the tokens of one row of the batch."""
    CHUNKS: tl.constexpr = (RANK + CHUNK - 1) // CHUNK
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < new_tokens * heads
    new_token, head = row // heads, row % heads
    column, rope_column = tl.arange(0, CHUNK), tl.arange(0, ROPE_BLOCK)

    at = query + batch * query_row + new_token.to(tl.int64) * query_token + head.to(tl.int64) * query_head
    queries, acc = (), ()
    for i in tl.static_range(CHUNKS):
        real_column = real[:, None] & (i * CHUNK + column < RANK)[None, :]
        queries = queries + (tl.load(at[:, None] + (i * CHUNK + column)[None, :], mask=real_column, other=0.0),)
        acc = acc + (tl.zeros((BLOCK_ROWS, CHUNK), tl.float32),)
    if ROPE > 0:
        real_rope = real[:, None] & (rope_column < ROPE)[None, :]
        rope_query = tl.load(at[:, None] + (RANK + rope_column)[None, :], mask=real_rope, other=0.0)

    if PAGE > 0:
        capacity *= PAGE
    length = capacity if lengths is None else tl.minimum(tl.load(lengths + batch), capacity)
    position = length - new_tokens + new_token
    low = 0 if starts is None else tl.load(starts + batch)
    low = tl.maximum(low, 0)
    start, stop = split_tokens(low, length, split, splits, BLOCK_TOKENS)

    m_i = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    l_i = tl.zeros((BLOCK_ROWS,), tl.float32)
    for first in range(start, stop, BLOCK_TOKENS):
        token = first + tl.arange(0, BLOCK_TOKENS)
        token_mask = token < stop
        if PAGE > 0:
            base = tl.load(pages + batch * pages_row + token // PAGE, mask=token_mask, other=0).to(tl.int64)
            token_index = (token % PAGE).to(tl.int64)
        else:
            base = batch
            token_index = token.to(tl.int64)

        latent_at = latent + base * latent_row + token_index * latent_token
        tiles = ()
        logits = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
        for i in tl.static_range(CHUNKS):
            tile_there = token_mask[:, None]
            if (i + 1) * CHUNK > RANK:
                tile_there = tile_there & (i * CHUNK + column < RANK)[None, :]
            tile = tl.load(latent_at[:, None] + (i * CHUNK + column)[None, :], mask=tile_there, other=0.0)
            tiles = tiles + (tile,)
            logits = tl.dot(queries[i], tl.trans(tile), logits, input_precision="ieee")
        if ROPE > 0:
            rope_at = rope_key + base * rope_key_row + token_index * rope_key_token
            tile_there = token_mask[:, None]
            if ROPE < ROPE_BLOCK:
                tile_there = tile_there & (rope_column < ROPE)[None, :]
            tile = tl.load(rope_at[:, None] + rope_column[None, :], mask=tile_there, other=0.0)
            logits = tl.dot(rope_query, tl.trans(tile), logits, input_precision="ieee")

        logits *= scale * LOG2E
        if key_gain is not None:
            gain_at = key_gain + base * key_gain_row + token_index * key_gain_token
            gain_there = real[:, None] & token_mask[None, :]
            gain = tl.load(gain_at[None, :] + (head // heads_per_gain)[:, None], mask=gain_there, other=0.0)
            logits *= gain.to(tl.float32)
        mask = token[None, :] <= tl.minimum(position, stop - 1)[:, None]
        logits = tl.where(mask, logits, -float("inf"))

        weights, m_i, l_i, alpha = softmax_step(logits, m_i, l_i, 1)
        weights = weights.to(latent.dtype.element_ty)
        new_acc = ()
        for i in tl.static_range(CHUNKS):
            new_acc = new_acc + (tl.dot(weights, tiles[i], acc[i] * alpha[:, None], input_precision="ieee"),)
        acc = new_acc

    inverse = 1.0 / tl.where(l_i > 0, l_i, 1.0)
    index = (batch * new_tokens * heads + row) * splits + split
    for i in tl.static_range(CHUNKS):
        real_column = real[:, None] & (i * CHUNK + column < RANK)[None, :]
        value = (acc[i] * inverse[:, None]).to(out.dtype.element_ty)
        tl.store(out + index[:, None] * RANK + (i * CHUNK + column)[None, :], value, mask=real_column)
    tl.store(log + index, log_of(m_i, l_i), mask=real)
