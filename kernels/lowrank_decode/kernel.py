r"""Decode attention over keys rebuilt from latents, with latents as values.

A program computes one KV head of one row, its query heads (times new tokens), over one split of the row's tokens. For
each block of tokens it rebuilds the head's keys, K = C Uᵀ, in registers, as two halves because RoPE rotates the halves
together: U's rows are loaded as halves, without a shuffle. Rotations are relative to the block's first position n₀:
keys rotate by their offset in the block, with one table for all blocks, queries by -n₀, with one row of cosines per
block. Tokens are the rows of all products, so that these run as WGMMA and the keys never leave registers; logits and
accumulators are therefore transposed.

Every KV head reads the latent, all but the first from L2, since the programs of a block's heads are adjacent in the
grid. Several heads per program would save at most half of the L2 traffic, since U, which is d/BLOCK as large as the
block of latents, is read in any case. They would also need each head's keys of the block, [BLOCK, d] in fp32, in
registers at once. The products of one head take 2·d·r_k operations per token: d·G operations per byte of a joint bf16
latent that G heads read, 64·G with separate latents for keys and values. At d = 128 two heads need 900 TFLOP/s on an
H100 at its full memory bandwidth: from G = 2 on the kernel is bound by compute, and a cache of G = 8 decodes slower
than the keys and values that it replaces.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.online_softmax import LOG2E, log_of, softmax_step
from surgery.kernels.split_kv import split_tokens


# These grow with the sequence; specialization would recompile the kernel.
@triton.jit(do_not_specialize=["capacity", "splits", "begin_rows"])
def lowrank_decode_kernel(
    query, latent, key_up, within, begins, key_bias, norm_weight, ranges, lengths, starts, out, log, scale, norm_eps,
    tokens, capacity, splits, begin_rows, query_row, query_token, query_head, latent_row, latent_token, up_head, up_dim,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, KEY_RANK: tl.constexpr, VALUE_RANK: tl.constexpr,
    RESIDENT: tl.constexpr, ALIGNED: tl.constexpr, SAME: tl.constexpr, EVEN: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS queries of one KV head of row `program_id(2)` over split `program_id(1)` of its tokens."""
    head = tl.program_id(0) // ROW_BLOCKS
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    width: tl.constexpr = DIM // 2
    dtype: tl.constexpr = query.dtype.element_ty

    length = capacity
    if lengths is not None:
        length = tl.load(lengths + row)
    start = 0
    if starts is not None:
        start = tl.load(starts + row)
    key_first, key_rank, value_first, value_rank = 0, KEY_RANK, 0, VALUE_RANK
    if ranges is not None:
        # A known common divisor lets the compiler vectorize the loads.
        key_first = tl.multiple_of(tl.load(ranges + head * 4), ALIGNED)
        key_rank = tl.multiple_of(tl.load(ranges + head * 4 + 1), ALIGNED)
        if SAME:
            value_first, value_rank = key_first, key_rank
        else:
            value_first = tl.multiple_of(tl.load(ranges + head * 4 + 2), ALIGNED)
            value_rank = tl.multiple_of(tl.load(ranges + head * 4 + 3), ALIGNED)

    # Queries, in halves: the heads of a token, then those of the next one.
    member = (tl.program_id(0) % ROW_BLOCKS) * ROWS + tl.arange(0, ROWS)
    token, head_in_group = member // SIZE, member % SIZE
    real = token < tokens
    own = length - tokens + token
    column = tl.arange(0, HALF)
    inside = column < width
    at = query + row * query_row + token.to(tl.int64) * query_token + (head * SIZE + head_in_group) * query_head
    at = at[:, None] + column[None, :]
    query_near = tl.load(at, mask=real[:, None] & inside[None, :], other=0.0)
    query_far = tl.load(at + width, mask=real[:, None] & inside[None, :], other=0.0)

    m_i = tl.full([ROWS], -float("inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    VALUE_CHUNKS: tl.constexpr = (VALUE_RANK + CHUNK - 1) // CHUNK
    acc = ()
    for _ in tl.static_range(VALUE_CHUNKS):
        acc += (tl.zeros([CHUNK, ROWS], tl.float32),)

    begin, end = split_tokens(start, tl.maximum(tl.minimum(length, capacity), start), split, splits, BLOCK)
    KEY_CHUNKS: tl.constexpr = (KEY_RANK + CHUNK - 1) // CHUNK
    ups = ()
    if RESIDENT:
        for piece in tl.static_range(KEY_CHUNKS):
            ups += load_up(key_up, head, up_head, up_dim, key_rank, piece, column, inside, DIM, CHUNK, EVEN)
    for block in range(begin, end, BLOCK):
        positions = block + tl.arange(0, BLOCK)
        filled = positions < end

        near = tl.zeros([BLOCK, HALF], tl.float32)
        far = tl.zeros([BLOCK, HALF], tl.float32)
        if RESIDENT:
            for piece in tl.static_range(KEY_CHUNKS):
                tile = load_latents(
                    latent, row, block, key_first, key_rank, piece, filled, latent_row, latent_token,
                    BLOCK, CHUNK, EVEN,
                )  # fmt: skip
                near = tl.dot(tile, ups[2 * piece], near, input_precision="ieee")
                far = tl.dot(tile, ups[2 * piece + 1], far, input_precision="ieee")
        else:
            for piece in range(KEY_CHUNKS):
                tile = load_latents(
                    latent, row, block, key_first, key_rank, piece, filled, latent_row, latent_token,
                    BLOCK, CHUNK, EVEN,
                )  # fmt: skip
                up_near, up_far = load_up(
                    key_up, head, up_head, up_dim, key_rank, piece, column, inside, DIM, CHUNK, EVEN
                )
                near = tl.dot(tile, up_near, near, input_precision="ieee")
                far = tl.dot(tile, up_far, far, input_precision="ieee")
        near, far = finished(near, far, key_bias, norm_weight, norm_eps, head, column, inside, DIM)
        turned_near, turned_far = query_near, query_far
        if within is not None:
            # `block` in the mask keeps the compiler from hoisting the table into registers for the whole loop.
            slot_mask = inside & (tl.zeros_like(column) + block < end)
            near, far = turned(near, far, within, STEP, tl.arange(0, BLOCK), column, slot_mask, width)
            cos, sin = rotation_at(within, begins, begin_rows, block, column, inside, width, STEP)
            turned_near = query_near * cos[None, :] + query_far * sin[None, :]
            turned_far = query_far * cos[None, :] - query_near * sin[None, :]
        logits = tl.dot(near.to(dtype), tl.trans(turned_near.to(dtype)), input_precision="ieee")
        logits = tl.dot(far.to(dtype), tl.trans(turned_far.to(dtype)), logits, input_precision="ieee")
        visible = filled[:, None] & (positions[:, None] <= own[None, :])
        logits = tl.where(visible, logits * (scale * LOG2E), -float("inf"))
        weights, m_i, l_i, alpha = softmax_step(logits, m_i, l_i, 0)

        weights = weights.to(dtype)
        new_acc = ()
        for piece in tl.static_range(VALUE_CHUNKS):
            tile = load_latents(
                latent, row, block, value_first, value_rank, piece, filled, latent_row, latent_token,
                BLOCK, CHUNK, EVEN,
            )  # fmt: skip
            new_acc += (tl.dot(tl.trans(tile), weights, acc[piece] * alpha[None, :], input_precision="ieee"),)
        acc = new_acc

    norm = 1.0 / tl.where(l_i > 0, l_i, 1.0)
    entry = (row * tokens + token) * (KV_HEADS * SIZE) + head * SIZE + head_in_group
    # This order of terms keeps register use as low as with a constant number of splits.
    at = out + split * VALUE_RANK + entry * (splits * VALUE_RANK)
    for piece in tl.static_range(VALUE_CHUNKS):
        number = piece * CHUNK + tl.arange(0, CHUNK)
        result = acc[piece] * norm[None, :]
        mask = (number < VALUE_RANK)[:, None] & real[None, :]
        tl.store(at[None, :] + number[:, None], result.to(out.dtype.element_ty), mask=mask)
    tl.store(log + entry * splits + split, log_of(m_i, l_i), mask=real)


@triton.jit
def load_latents(
    latent, row, start, first, rank, piece, filled, latent_row, latent_token,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Load chunk `piece` of the latent elements from `first` on, for BLOCK tokens from `start` on; zero if masked."""
    chunk = tl.arange(0, CHUNK)
    mask = filled[:, None]
    if not EVEN:
        mask = mask & (chunk < rank - piece * CHUNK)[None, :]
    # The chunk offset comes last, so that it is an immediate of the load and takes no registers.
    # Token offsets within the block are 32 bits wide.
    base = latent + row * latent_row + first + tl.cast(start, tl.int64) * latent_token
    at = base + (tl.arange(0, BLOCK)[:, None] * latent_token + chunk[None, :]) + piece * CHUNK
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def load_up(
    key_up, head, up_head, up_dim, rank, piece, column, inside,
    DIM: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Load chunk `piece` of a head's up-projection, transposed, for both halves of its keys: two [CHUNK, HALF]."""
    chunk = tl.arange(0, CHUNK)
    at = (key_up + head.to(tl.int64) * up_head) + column[None, :] * up_dim + chunk[:, None] + piece * CHUNK
    mask = inside[None, :]
    if not EVEN:
        mask = mask & (chunk < rank - piece * CHUNK)[:, None]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + (DIM // 2) * up_dim, mask=mask, other=0.0)


@triton.jit
def finished(near, far, key_bias, norm_weight, norm_eps, head, column, inside, DIM: tl.constexpr):
    """Apply the optional bias and RMS norm to both halves of keys."""
    if key_bias is not None:
        at = key_bias + head * DIM + column
        near += tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :]
        far += tl.load(at + DIM // 2, mask=inside, other=0.0).to(tl.float32)[None, :]
    if norm_weight is not None:
        square = tl.sum(near * near, axis=1) + tl.sum(far * far, axis=1)
        inverse = tl.rsqrt(square / DIM + norm_eps)[:, None]
        near *= inverse * tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        far *= inverse * tl.load(norm_weight + DIM // 2 + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    return near, far


@triton.jit
def turned(near, far, table, table_rows, rows, column, inside, width: tl.constexpr):
    """Rotate both halves of keys by row `rows[i]` of the table for key i."""
    at = table + rows[:, None] * width + column[None, :]
    cos = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
    sin = tl.load(at + table_rows * width, mask=inside[None, :], other=0.0).to(tl.float32)
    return near * cos - far * sin, far * cos + near * sin


@triton.jit
def rotation_at(within, begins, begin_rows, position, column, inside, width: tl.constexpr, STEP: tl.constexpr):
    """Return the cosines and sines [width] of one position."""
    at = within + (position % STEP) * width + column
    cos_near = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    sin_near = tl.load(at + STEP * width, mask=inside, other=0.0).to(tl.float32)
    at = begins + (position // STEP) * width + column
    cos_far = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    sin_far = tl.load(at + begin_rows * width, mask=inside, other=0.0).to(tl.float32)
    return cos_near * cos_far - sin_near * sin_far, sin_near * cos_far + cos_near * sin_far
