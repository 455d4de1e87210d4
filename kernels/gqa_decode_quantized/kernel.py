r"""Grouped-query decoding over keys and values of 8, 4 or 2 bits. Scales are folded into what meets them.

Keys by channel: a step stays in one group of tokens, whose scales s and zero points z [d] go into the query,

    q · k = (q ∘ s) · c + q · z

Keys by token: each group g of channels is a product of its own, of which token n's scale is a factor,

    q · k_n = Σ_g s_ng (q_g · c_ng) + z_ng Σ q_g

Values by token: the rows of the tile are a query head for every group of channels, and row (g, h) mixes all channels
with weights p_n s_ng, of which group g is right and is stored. Decoding has rows to spare: it pads them to 16.

    out_hg = Σ_n (p_hn s_ng) c_ng + Σ_n p_hn z_ng

The products' operands are rounded to the query's dtype, the sums are fp32. In fp16, where p s may be too small, s is
measured in units of the greatest so far.

Tokens that share a byte are products of their own (attention does not care about the order of tokens), and so are
the even and odd channels of values: pairs of bytes are read from shared memory transposed, single ones cannot be.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.gqa_decode.kernel import reach, row_length
from surgery.kernels.gqa_decode_quantized.reference import quantized_attention
from surgery.kernels.launch import Config, Launch, launches_of, size, strides
from surgery.kernels.online_softmax import LOG2E, log_of
from surgery.kernels.quantization import BITS, group_size
from surgery.kernels.split_kv import scratch, split_tokens, splits_of, with_merge
from surgery.kernels.tuned import key_of, tuned

MOST_STEP = 128
"""Tokens of a step at most; larger groups of keys must be multiples of a step."""


def default_config(query: Tensor, value_scale: Tensor, group: int, keys: str) -> Config:
    """A step has one group of keys, loaded well ahead; more than 16 rows need eight warps' registers."""
    pairs = query.shape[1] * (query.shape[2] // value_scale.shape[1])
    rows = min(max(triton.next_power_of_2(pairs * value_scale.shape[-1]), 16), 64)
    step = group if keys == "channel" and group < 64 else 64
    return Config(block_rows=rows, block_tokens=step, warps=4 if rows == 16 else 8, stages=4)


def config_of(query: Tensor, value_scale: Tensor, format: str, group: int, keys: str) -> Config:
    """Return the fastest measured configuration for a shape, or the default."""
    shape = key_of(
        tokens=query.shape[1],
        heads=query.shape[2],
        groups=value_scale.shape[1],
        d=query.shape[-1],
        value_groups=value_scale.shape[-1],
        format=format,
        group=group,
        keys=keys,
        dtype=query.dtype,
    )
    return tuned("gqa_decode_quantized", shape, query.device, default_config(query, value_scale, group, keys))


def step_tokens(config: Config, format: str, group: int, keys: str) -> int | None:
    """Tokens of a step: the configured ones, or a whole group of keys by channel that they do not divide.

    None if such a group is larger than `MOST_STEP`.
    """
    if keys == "token" or group % config.block_tokens == 0:
        return config.block_tokens
    return group if group <= MOST_STEP else None


def pairs_of(query: Tensor, value_scale: Tensor, config: Config) -> int:
    """Pairs of a new token and a query head in one program; each is as many rows as values have groups."""
    pairs = query.shape[1] * (query.shape[2] // value_scale.shape[1])
    return min(pairs, max(config.block_rows // value_scale.shape[-1], 1))


@launches_of(quantized_attention, "splits")
def launches(args: SimpleNamespace, *, out: Tensor, lse: Tensor, config: Config | None = None) -> list[Launch]:
    """The launches that fill `out` [B, T, H, v] and `lse` [B, T, H] fp32, both contiguous.

    The others are arguments of `gqa_decode_quantized`; the last dimension of codes contiguous, the last two of scales
    and zero points.
    """
    query, key_scale, value_codes, value_scale = args.query, args.key_scale, args.value_codes, args.value_scale
    rows, tokens, heads, d = query.shape
    groups, v, value_groups = args.key_codes.shape[1], value_codes.shape[-1], value_scale.shape[-1]
    format, group, keys = args.format, args.group, args.keys
    config = config or config_of(query, value_scale, format, group, keys)
    bits, step = BITS[format], step_tokens(config, format, group, keys)
    pairs = pairs_of(query, value_scale, config)
    blocks = triton.cdiv(tokens * heads // groups, pairs)
    capacity, programs = value_scale.shape[2], rows * groups * blocks
    splits = args.splits or splits_of(config, programs, query, capacity, args.window, waves=2)
    parts, logs = scratch(query, v, splits)
    by_channel = keys == "channel"
    key_groups = 1 if by_channel else key_scale.shape[-1]
    key_size = d if by_channel else group_size(d, key_groups)
    launch = Launch.of(
        gqa_decode_quantized_kernel,
        (blocks * splits, groups, rows),
        config,
        vars(args),
        key=args.key_codes,
        value=value_codes,
        out=out if parts is None else parts,
        lse=lse if logs is None else logs,
        capacity=size(value_scale, 2),
        splits=splits,
        tokens=tokens,
        heads=heads,
        **strides("b", "t", "h", query=query),
        **strides("b", "g", "s", key=args.key_codes),
        **strides("b", "g", key_scale=key_scale, value_scale=value_scale),
        # The kernel reads pairs of channels.
        **{name: stride // 2 for name, stride in strides("b", "g", "s", value=value_codes).items()},
        BITS=bits,
        FLOAT=format == "fp8",
        NARROW=query.dtype == torch.float16,
        GROUP=group if by_channel else 0,
        KEY_GROUPS=key_groups,
        KEY_SIZE=key_size,
        VALUE_GROUPS=value_groups,
        VALUE_SIZE=group_size(v, value_groups),
        PER_GROUP=heads // groups,
        PAIRS=pairs,
        STEP=step,
        D=d,
        V=v,
        BLOCK_M=max(triton.next_power_of_2(pairs * value_groups), 16),
        BLOCK_N=max(triton.next_power_of_2(step * bits // 8), 16),
        BLOCK_D=max(triton.next_power_of_2(key_size), 16),
        BLOCK_V=max(triton.next_power_of_2(v // 2), 16),
        BLOCK_G=max(triton.next_power_of_2(value_groups), 16),
    )
    return with_merge(launch, parts, logs, out, lse)


# These grow with a text: not worth a compilation each.
@triton.jit(do_not_specialize=["capacity", "splits", "behind"])
def gqa_decode_quantized_kernel(
    query, key, key_scale, key_zero, value, value_scale, value_zero, out, lse, lengths, coded, starts, scale, capacity,
    splits, behind, window, tokens, heads, query_b, query_t, query_h, key_b, key_g, key_s, key_scale_b, key_scale_g,
    value_b, value_g, value_s, value_scale_b, value_scale_g,
    BITS: tl.constexpr, FLOAT: tl.constexpr, NARROW: tl.constexpr, GROUP: tl.constexpr, KEY_GROUPS: tl.constexpr,
    KEY_SIZE: tl.constexpr, VALUE_GROUPS: tl.constexpr, VALUE_SIZE: tl.constexpr, 
    PER_GROUP: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One program: one row, one KV head, PAIRS pairs of a new token and a head, one split of the tokens."""
    PLANES: tl.constexpr = 8 // BITS
    blocks = tl.cdiv(tokens * PER_GROUP, PAIRS)
    block = tl.program_id(0) % blocks
    split = tl.program_id(0) // blocks
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    dtype = query.dtype.element_ty

    m = tl.arange(0, BLOCK_M)
    channels = m // PAIRS
    pair = block * PAIRS + m % PAIRS
    row_mask = (channels < VALUE_GROUPS) & (pair < tokens * PER_GROUP)
    time = pair // PER_GROUP
    head = group * PER_GROUP + pair % PER_GROUP
    length = row_length(lengths, row, capacity + behind)
    position = length - tokens + time
    low, high = reach(starts, row, length, row_length(coded, row, capacity), window, tokens, block, PAIRS, PER_GROUP)
    high = tl.minimum(high, capacity)
    begin, end = split_tokens(low // STEP * STEP, high, split, splits, STEP)

    d = tl.arange(0, BLOCK_D)
    at = query + row * query_b + time[:, None] * query_t + head[:, None] * query_h + d[None, :]
    q = ()
    q_sum = ()
    for g in tl.static_range(KEY_GROUPS):
        own = row_mask[:, None] & (d < KEY_SIZE)[None, :] & (g * KEY_SIZE + d < D)[None, :]
        part = tl.load(at + g * KEY_SIZE, mask=own, other=0.0)
        q = q + (part,)  # noqa: RUF005 - Triton knows no other
        q_sum = q_sum + (tl.sum(part.to(tl.float32), axis=1),)  # noqa: RUF005

    i = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_V)
    g_of = tl.arange(0, BLOCK_G)
    first_byte = (begin * BITS // 8).to(tl.int64)
    key += row * key_b + group * key_g + first_byte * key_s
    # Pairs of channels.
    value = value.to(tl.pointer_type(tl.int16)) + row * value_b + group * value_g + first_byte * value_s
    value_at = row * value_scale_b + group * value_scale_g
    value_scale += value_at
    key_at = row * key_scale_b + group * key_scale_g
    key_scale += key_at
    if not FLOAT:
        value_zero += value_at
        key_zero += key_at
    # Picks the scale of a row's group of channels; exact, as it multiplies one number by 1.
    pick = (channels[:, None] == g_of[None, :]).to(value_scale.dtype.element_ty)

    m_i = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    zeros = tl.zeros([BLOCK_M], tl.float32)
    unit = tl.full([BLOCK_M], 1e-30, tl.float32)
    even = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    odd = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for first in range(begin, end, STEP):
        byte = (i < STEP * BITS // 8) & (first + i * PLANES < end)
        logits = ()
        now = m_i
        if GROUP:
            codes = tl.load(key + (i * key_s)[:, None] + d[None, :], mask=byte[:, None] & (d < D)[None, :], other=0)
            of = first // GROUP * D + d
            factor = tl.load(key_scale + of, mask=d < D, other=0.0).to(tl.float32)
            folded = (q[0].to(tl.float32) * factor[None, :]).to(dtype)
            shift = tl.zeros([BLOCK_M], tl.float32)
            if not FLOAT:
                zero = tl.load(key_zero + of, mask=d < D, other=0.0).to(tl.float32)
                shift = tl.sum(q[0].to(tl.float32) * zero[None, :], axis=1)
            for plane in tl.static_range(PLANES):
                k = number(codes, plane * BITS, BITS, FLOAT).to(dtype)
                logit = tl.dot(folded, tl.trans(k), input_precision="ieee") + shift[:, None]
                logits = logits + (logit,)  # noqa: RUF005
        else:
            for plane in tl.static_range(PLANES):
                token = first + i * PLANES + plane
                logit = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for g in tl.static_range(KEY_GROUPS):
                    within = (d < KEY_SIZE) & (g * KEY_SIZE + d < D)
                    codes = tl.load(
                        key + (i * key_s)[:, None] + g * KEY_SIZE + d[None, :],
                        mask=byte[:, None] & within[None, :],
                        other=0,
                    )
                    k = number(codes, plane * BITS, BITS, FLOAT).to(dtype)
                    of = token * KEY_GROUPS + g
                    token_mask = byte & (token < end)
                    factor = tl.load(key_scale + of, mask=token_mask, other=0.0).to(tl.float32)
                    logit += tl.dot(q[g], tl.trans(k), input_precision="ieee") * factor[None, :]
                    if not FLOAT:
                        zero = tl.load(key_zero + of, mask=token_mask, other=0.0).to(tl.float32)
                        logit += q_sum[g][:, None] * zero[None, :]
                logits = logits + (logit,)  # noqa: RUF005
        key += STEP * BITS // 8 * key_s

        masked = ()
        factors = ()
        units = unit
        for plane in tl.static_range(PLANES):
            token = first + i * PLANES + plane
            token_mask = byte & (token >= low) & (token < end)
            mask = token_mask[None, :] & (token[None, :] <= position[:, None])
            if window is not None:
                mask = mask & (token[None, :] > position[:, None] - window)
            logit = tl.where(mask, logits[plane] * (scale * LOG2E), -float("inf"))
            now = tl.maximum(now, tl.max(logit, axis=1))
            masked = masked + (logit,)  # noqa: RUF005
            factor = picked(value_scale, pick, token, token_mask, g_of, VALUE_GROUPS)
            if NARROW:
                units = tl.maximum(units, tl.max(factor, axis=1))
            factors = factors + (factor,)  # noqa: RUF005
        base = tl.where(now == -float("inf"), 0.0, now)
        alpha = tl.exp2(m_i - base)
        m_i = now
        l_i *= alpha
        zeros *= alpha
        if NARROW:
            alpha *= unit / units
            unit = units
        even *= alpha[:, None]
        odd *= alpha[:, None]
        pairs = tl.load(
            value + (i * value_s)[:, None] + c[None, :], mask=byte[:, None] & (c < V // 2)[None, :], other=0
        )
        value += STEP * BITS // 8 * value_s
        for plane in tl.static_range(PLANES):
            token = first + i * PLANES + plane
            weights = tl.exp2(masked[plane] - base[:, None])
            l_i += tl.sum(weights, axis=1)
            if not FLOAT:
                token_mask = byte & (token >= low) & (token < end)
                zeros += tl.sum(weights * picked(value_zero, pick, token, token_mask, g_of, VALUE_GROUPS), axis=1)
            weights *= factors[plane]
            if NARROW:
                weights *= (1.0 / unit)[:, None]
            weights = weights.to(dtype)
            even = tl.dot(weights, number(pairs, plane * BITS, BITS, FLOAT).to(dtype), even, input_precision="ieee")
            odd = tl.dot(weights, number(pairs, 8 + plane * BITS, BITS, FLOAT).to(dtype), odd, input_precision="ieee")

    some = tl.where(l_i > 0, l_i, 1.0)
    if NARROW:
        even *= unit[:, None]
        odd *= unit[:, None]
    even = (even + zeros[:, None]) / some[:, None]
    odd = (odd + zeros[:, None]) / some[:, None]
    place = ((row * tokens + time) * heads + head) * splits + split
    column = out + place[:, None] * V + 2 * c[None, :]
    mine = row_mask[:, None] & (c < V // 2)[None, :]
    right = 2 * c // VALUE_SIZE
    tl.store(column, even.to(out.dtype.element_ty), mask=mine & (right[None, :] == channels[:, None]))
    right = (2 * c + 1) // VALUE_SIZE
    tl.store(column + 1, odd.to(out.dtype.element_ty), mask=mine & (right[None, :] == channels[:, None]))
    tl.store(lse + place, log_of(m_i, l_i), mask=row_mask & (channels == 0))


@triton.jit
def number(codes, shift, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """The numbers, fp32, of codes of BITS bits that begin at bit `shift`: by arithmetic, faster than conversion."""
    bits = codes.to(tl.int32) >> shift
    if FLOAT:
        # The exponent is 120 too small in the place of fp32's; subnormal ones come out right, too.
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    # An integer below 2^23 is the mantissa of 2^23 plus it.
    return ((bits & (2**BITS - 1)) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def picked(factors, pick, token, token_mask, g_of, GROUPS: tl.constexpr):
    """[M, N] fp32: of tokens' scales or zero points, GROUPS a token, the one that each row wants."""
    each = tl.load(
        factors + (token * GROUPS)[:, None] + g_of[None, :],
        mask=token_mask[:, None] & (g_of < GROUPS)[None, :],
        other=0.0,
    )
    return tl.dot(pick, tl.trans(each), input_precision="ieee")
