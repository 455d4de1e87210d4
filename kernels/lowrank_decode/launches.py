"""Launches of `lowrank_decode`: kernel arguments and configuration from the tensors of a call."""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace

import torch
import triton
from torch import Tensor

from surgery.kernels.launch import Config, Launch, capability_of, launches_of, size, strides
from surgery.kernels.lowrank_decode.kernel import lowrank_decode_kernel
from surgery.kernels.lowrank_decode.reference import STEP, lowrank_attention
from surgery.kernels.split_kv import scratch, splits_of, with_merge

RESIDENT_BYTES = 64 * 1024
"""Maximum size of a head's up-projection that stays in shared memory; larger ones are reloaded for every block."""


def chunk_of(*ranks: int, max_chunk: int = 128) -> int:
    """Return the latent elements per product: the widest chunk that divides all ranks, or 64 or less with a mask."""
    for chunk in (128, 64, 32):
        if chunk <= max_chunk and all(rank % chunk == 0 for rank in ranks):
            return chunk
    return max(16, min(64, triton.next_power_of_2(max(ranks))))


def default_config(*, dim: int, key_rank: int, value_rank: int, dtype: torch.dtype, capability: int = 90) -> Config:
    """Return the default tiling for a KV head; it compiles without spills for a compute capability (80, 90).

    64 tokens are the rows of a WGMMA. Older GPUs have no WGMMA, and too few registers for 64 tokens if U is reloaded
    through shared memory: 32 tokens there.
    """
    resident = key_rank * dim * dtype.itemsize <= RESIDENT_BYTES
    if capability >= 90:
        return Config(block_tokens=64, chunk=chunk_of(key_rank, value_rank, max_chunk=64), warps=8)
    max_chunk = 64 if resident and dtype == torch.float32 else 128
    return Config(
        block_tokens=64 if resident else 32, chunk=chunk_of(key_rank, value_rank, max_chunk=max_chunk), warps=8
    )


@launches_of(lowrank_attention)
def launches(args: SimpleNamespace, *, out: Tensor, lse: Tensor, config: Config | None = None) -> list[Launch]:
    """Return the launches that fill `out` [B, T, H, r_v] and `lse` [B, T, H] fp32, both contiguous.

    `args` are those of the reference.
    """
    query, latent, key_up, ranges = args.query, args.latent, args.key_up, args.ranges
    batch, tokens, heads, dim = query.shape
    kv_heads, per_head = key_up.shape[0], heads // key_up.shape[0]
    value_rank, key_rank, dtype = out.shape[-1], key_up.shape[-1], query.dtype
    if config is None:
        ranks = {"key_rank": key_rank, "value_rank": value_rank}
        config = default_config(dim=dim, **ranks, dtype=dtype, capability=capability_of(query.device))
    row_blocks = triton.cdiv(per_head * tokens, config.block_rows)
    splits = splits_of(config, batch * kv_heads * row_blocks, query, latent.shape[1])
    parts, logs = scratch(query, out.shape[-1], splits)
    resident = key_rank * dim * dtype.itemsize <= RESIDENT_BYTES
    reads = [0, key_rank, 0, value_rank] if ranges is None else ranges
    even = {*reads[1::4], *reads[3::4]} == {key_rank, value_rank} and key_rank % config.chunk == 0
    even = even and value_rank % config.chunk == 0 and len({*reads[1::4]}) == len({*reads[3::4]}) == 1
    launch = Launch.of(
        lowrank_decode_kernel,
        (kv_heads * row_blocks, splits, batch),
        config,
        vars(args),
        ranges=None if ranges is None else _on_device(tuple(ranges), query.device),
        out=out if parts is None else parts,
        log=lse if logs is None else logs,
        scale=float(args.scale),
        norm_eps=float(args.norm_eps),
        tokens=tokens,
        capacity=size(latent, 1),
        splits=splits,
        begin_rows=0 if args.begins is None else size(args.begins, 1),
        **strides("row", "token", "head", query=query),
        **strides("row", "token", latent=latent),
        **strides("head", "dim", up=key_up),
        KV_HEADS=kv_heads,
        SIZE=per_head,
        DIM=dim,
        KEY_RANK=key_rank,
        VALUE_RANK=value_rank,
        RESIDENT=resident,
        ALIGNED=math.gcd(16, *reads),
        SAME=reads[0::4] == reads[2::4] and reads[1::4] == reads[3::4],
        EVEN=even,
        ROW_BLOCKS=row_blocks,
        ROWS=config.block_rows,
        BLOCK=config.block_tokens,
        CHUNK=config.chunk,
        HALF=max(16, triton.next_power_of_2(dim // 2)),
        STEP=STEP,
    )
    return with_merge(launch, parts, logs, out, lse)


@cache
def _on_device(ranges: tuple[int, ...], device: torch.device) -> Tensor:
    """Copy to the device once, so that the address stays valid in a CUDA graph."""
    return torch.tensor(ranges, dtype=torch.int32, device=device).view(-1, 4)
