"""The launches of `lowrank_decode`: arguments and configuration of its kernel from the tensors at hand."""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
from torch import Tensor

from surgery.kernels.launch import Config, Launch
from surgery.kernels.lowrank_decode.kernel import lowrank_decode_kernel
from surgery.kernels.lowrank_decode.reference import STEP
from surgery.kernels.split_kv import merge_launch, processors, split_count

RESIDENT_BYTES = 64 * 1024
"""Up-projections of one head up to this size may stay in shared memory, larger ones pass through it for every block."""


def chunk_of(*ranks: int, most: int = 128) -> int:
    """Numbers of a latent in one product: the most that divides all ranks, or 64 (less for small ones) with a mask."""
    for chunk in (128, 64, 32):
        if chunk <= most and all(rank % chunk == 0 for rank in ranks):
            return chunk
    return max(16, min(64, triton.next_power_of_2(max(ranks))))


def default_config(
    *, dim: int, key_rank: int, value_rank: int, dtype: torch.dtype, capability: int = 90, plain: bool = True
) -> Config:
    """The configuration for a KV head, chosen by what compiles for GPUs of a capability (80, 90) without spills.

    64 tokens are the rows of a warp group's matrix instruction. Older GPUs have none, and too few registers for as many
    tokens where U passes through shared memory: 32 there. `plain` is without codes and without exact tokens.
    """
    if plain and key_rank * dim * dtype.itemsize <= RESIDENT_BYTES:
        most = 64 if dtype == torch.float32 else 128
        return Config(block_tokens=64, chunk=chunk_of(key_rank, value_rank, most=most), warps=8)
    if capability >= 90:
        return Config(block_tokens=64, chunk=chunk_of(key_rank, value_rank, most=64), warps=8)
    return Config(block_tokens=32, chunk=chunk_of(key_rank, value_rank), warps=8)


def launches(
    query: Tensor,
    latent: Tensor,
    key_up: Tensor,
    scale: float,
    out: Tensor,
    log: Tensor,
    *,
    config: Config,
    splits: int | None = None,
    resident: bool | None = None,
    parts: Tensor | None = None,
    part_logs: Tensor | None = None,
    code_scale: Tensor | None = None,
    code_zero: Tensor | None = None,
    bits: int = 0,
    group: int = 0,
    by_channel: bool = False,
    within: Tensor | None = None,
    begins: Tensor | None = None,
    key_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    ranges: list[int] | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    first: Tensor | None = None,
    held: Tensor | None = None,
    rebuilt: Tensor | None = None,
    window: int = 0,
    sinks: int = 0,
    exact_key: Tensor | None = None,
    exact_value: Tensor | None = None,
    exact_slots: Tensor | None = None,
    raw_exact: bool = False,
) -> list[Launch]:
    """The launches that fill `out` [B, T, H, r_v + v] and `log` [B, T, H], both contiguous.

    `parts` fp32 [B·T·H, splits, r_v + v] and `part_logs` fp32 [B·T·H, splits] are needed with more than one split.
    """
    batch, tokens, heads, dim = query.shape
    kv_heads, size = key_up.shape[0], heads // key_up.shape[0]
    exact_dim = 0 if exact_value is None else exact_value.shape[-1]
    value_rank = out.shape[-1] - exact_dim
    splits = splits_of(query, latent, key_up, config, bits) if splits is None else splits
    row_blocks = triton.cdiv(size * tokens, config.block_rows)
    capacity = latent.shape[1] * (8 // bits if bits else 1)
    whole = splits == 1
    key_rank, dtype = key_up.shape[-1], query.dtype
    if resident is None:
        # Codes and exact tokens leave no registers for it, but for a few tokens that share their scales.
        room = exact_key is None and (not bits or (by_channel and config.block_tokens < 64))
        resident = room and key_rank * dim * dtype.itemsize <= RESIDENT_BYTES
    reads = [0, key_rank, 0, value_rank] if ranges is None else ranges
    even = {*reads[1::4], *reads[3::4]} == {key_rank, value_rank} and key_rank % config.chunk == 0
    even = even and value_rank % config.chunk == 0 and len({*reads[1::4]}) == len({*reads[3::4]}) == 1
    scales = code_scale if code_scale is not None else latent
    arguments = {
        "query": query,
        "latent": latent,
        "code_scale": code_scale,
        "code_zero": code_zero,
        "key_up": key_up,
        "within": within,
        "begins": begins,
        "key_bias": key_bias,
        "norm_weight": norm_weight,
        "ranges": None if ranges is None else _on_device(tuple(ranges), query.device),
        "lengths": lengths,
        "starts": starts,
        "first": first,
        "held": held,
        "rebuilt": rebuilt,
        "exact_key": exact_key,
        "exact_value": exact_value,
        "exact_slots": exact_slots,
        "out": out if whole else parts,
        "log": log if whole else part_logs,
        "scale": float(scale),
        "norm_eps": float(norm_eps),
        "tokens": tokens,
        "capacity": capacity,
        "begin_rows": 0 if begins is None else begins.shape[1],
        "window": window,
        "sinks": sinks,
        "exact_tokens": 0 if exact_key is None else exact_key.shape[2],
        **_strides("query", query, ("row", "token", "head")),
        **_strides("latent", latent, ("row", "token")),
        **_strides("scale", scales, ("row", "token")),
        **_strides("up", key_up, ("head", "dim")),
        **_strides("key", exact_key, ("row", "head", "token")),
        **_strides("value", exact_value, ("row", "head", "token")),
        **_strides("slots", exact_slots, ("row",)),
        "KV_HEADS": kv_heads,
        "SIZE": size,
        "DIM": dim,
        "KEY_RANK": key_up.shape[-1],
        "VALUE_RANK": value_rank,
        "EXACT_DIM": exact_dim,
        "BITS": bits,
        "GROUP": group,
        "BY_CHANNEL": by_channel,
        "RAW_EXACT": raw_exact,
        "RESIDENT": resident,
        "ALIGNED": math.gcd(16, *reads),
        "SAME": reads[0::4] == reads[2::4] and reads[1::4] == reads[3::4],
        "EVEN": even,
        "ROW_BLOCKS": row_blocks,
        "SPLITS": splits,
        "ROWS": config.block_rows,
        "BLOCK": config.block_tokens,
        "CHUNK": config.chunk,
        "HALF": max(16, triton.next_power_of_2(dim // 2)),
        "EXACT_BLOCK": 64,
        "EXACT_WIDTH": max(16, triton.next_power_of_2(exact_dim)),
        "STEP": STEP,
    }
    grid = (kv_heads * row_blocks, splits, batch)
    made = [Launch(lowrank_decode_kernel, grid, arguments, warps=config.warps, stages=config.stages)]
    if not whole:
        made.append(merge_launch(parts, part_logs, out.view(-1, out.shape[-1]), log.view(-1)))
    return made


def splits_of(query: Tensor, latent: Tensor, key_up: Tensor, config: Config, bits: int = 0) -> int:
    """Splits of a launch for these tensors."""
    if config.splits is not None:
        return config.splits
    kv_heads = key_up.shape[0]
    row_blocks = triton.cdiv(query.shape[2] // kv_heads * query.shape[1], config.block_rows)
    capacity = latent.shape[1] * (8 // bits if bits else 1)
    return split_count(query.shape[0] * kv_heads * row_blocks, capacity, processors(query.device))


@cache
def _on_device(ranges: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied once: a CUDA graph must find it there."""
    return torch.tensor(ranges, dtype=torch.int32, device=device).view(-1, 4)


def _strides(name: str, tensor: Tensor | None, dimensions: tuple[str, ...]) -> dict[str, int]:
    return {f"{name}_{dim}": 0 if tensor is None else tensor.stride(i) for i, dim in enumerate(dimensions)}
