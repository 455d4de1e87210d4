r"""Split-KV attention: several programs share the tokens of a row, and their partial results are merged.

Decoding has few rows, so the tokens of a row are divided into splits (Flash-Decoding, Dao et al. 2023). Each split
computes its softmax-weighted mean o_s and the logarithm of its sum of exponentials ℓ_s. The exact result is

    ℓ = log Σ_s exp ℓ_s        o = Σ_s exp(ℓ_s - ℓ) o_s

A split without tokens has o = 0 and ℓ = -∞, and so has a row without tokens, never NaN.

The number of splits follows from shapes alone and each split finds its tokens from the lengths on the device, so that
a launch recorded in a CUDA graph stays valid while sequences grow.

Shapes: N rows, S splits, D elements of a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.launch import Config, Launch
from surgery.kernels.online_softmax import LN2, LOG2E


def processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU; 16 for other devices, so that tests use splits."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 16


def splits_of(config: Config, programs: int, query: Tensor, capacity: int) -> int:
    """Return the splits per row of a query [B, T, H, ·], as configured or from shapes alone.

    ``programs`` are those without splits, ``capacity`` the tokens that a row has room for.
    """
    if config.splits is not None:
        return config.splits
    return split_count(programs, capacity, processors(query.device))


def scratch(query: Tensor, width: int, splits: int) -> tuple[Tensor | None, Tensor | None]:
    """Allocate fp32 partial results [B·T·H, splits, width] and logs [B·T·H, splits]; (None, None) for one split."""
    if splits == 1:
        return None, None
    shape = (query.shape[:3].numel(), splits)
    return query.new_empty(*shape, width, dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


def with_merge(launch: Launch, parts: Tensor | None, logs: Tensor | None, out: Tensor, lse: Tensor) -> list[Launch]:
    """Append the launch that merges partial results into `out` [B, T, H, width] and `lse`; none for one split."""
    if parts is None:
        return [launch]
    return [replace(launch, scratch=(parts, logs)), merge_launch(parts, logs, out, lse)]


def merge(parts: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """Merge parts [N, S, D] and logs [N, S] into [N, D] and [N]; PyTorch reference of `merge_kernel`."""
    lse = logs.logsumexp(dim=-1)
    weights = (logs - lse.unsqueeze(-1)).exp().nan_to_num(0.0)  # -∞ - -∞ for a row without tokens
    return (weights.unsqueeze(-1) * parts).sum(dim=-2), lse


def merge_launch(parts: Tensor, logs: Tensor, out: Tensor, log: Tensor) -> Launch:
    """Return the launch that merges fp32 parts [N, S, D] and logs [N, S] into `out` [N, D] and `log` [N] fp32.

    All tensors are contiguous; `out` may have any dtype, and N may span several dimensions of `out` and `log`.
    """
    rows, splits, width = parts.shape
    # A tile with all splits must fit into registers: 64 per thread.
    block = max(16, min(triton.next_power_of_2(width), 8192 // triton.next_power_of_2(splits)))
    arguments = {
        "parts": parts,
        "logs": logs,
        "out": out,
        "log": log,
        "width": width,
        "SPLITS": splits,
        "BLOCK_S": triton.next_power_of_2(splits),
        "BLOCK_D": block,
    }
    return Launch(merge_kernel, (rows, triton.cdiv(width, block)), arguments, warps=4, stages=1)


@triton.jit
def merge_kernel(parts, logs, out, log, width, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """Merge BLOCK_D elements of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.arange(0, BLOCK_S)
    each = tl.load(logs + row * SPLITS + split, mask=split < SPLITS, other=-float("inf"))
    m_i = tl.max(each, axis=0)
    m_i = tl.where(m_i == -float("inf"), 0.0, m_i)
    weights = tl.exp2((each - m_i) * LOG2E)
    l_i = tl.sum(weights, axis=0)
    load_mask = (split < SPLITS)[:, None] & (column < width)[None, :]
    part = tl.load(parts + (row * SPLITS + split[:, None]) * width + column[None, :], mask=load_mask, other=0.0)
    acc = tl.sum(part * weights[:, None], axis=0) / tl.where(l_i > 0, l_i, 1.0)
    tl.store(out + row * width + column, acc.to(out.dtype.element_ty), mask=column < width)
    if tl.program_id(1) == 0:
        lse = tl.where(l_i > 0, m_i + tl.log2(tl.where(l_i > 0, l_i, 1.0)) * LN2, -float("inf"))
        tl.store(log + row, lse)


@triton.jit
def split_tokens(low, length, split, splits, BLOCK: tl.constexpr):
    """Return start and end of a split of the tokens in [low, length), in multiples of BLOCK.

    The number of splits is no `tl.constexpr`, since it grows with the sequence.
    """
    each = tl.cdiv(tl.cdiv(length - low, splits), BLOCK) * BLOCK
    start = low + split * each
    return start, tl.minimum(start + each, length)


LEAST_TOKENS = 512
"""Minimum tokens per split; below, writing and reading its fp32 partial result takes longer than the split saves."""

MOST_SPLITS = 128


def split_count(programs: int, tokens: int, processors: int) -> int:
    """Return a power of two of splits for up to two waves of programs, with at least `LEAST_TOKENS` tokens per split.

    ``tokens`` is the capacity of a row, not its length. A power of two up to `MOST_SPLITS` compiles few kernels.
    """
    count = min(2 * processors // max(programs, 1), tokens // LEAST_TOKENS, MOST_SPLITS)
    return 1 << (max(count, 1).bit_length() - 1)
