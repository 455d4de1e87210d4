r"""Attention over one row's tokens by several programs at once, and how their parts become one result.

Decoding has few rows, so the tokens of a row are dealt out to splits (Flash-Decoding, Dao et al. 2023). A split leaves
its own softmax-weighted mean o_s and the logarithm of its sum of exponentials ℓ_s; the whole is

    ℓ = log Σ_s exp ℓ_s        o = Σ_s exp(ℓ_s - ℓ) o_s

exactly. A split without tokens leaves o = 0 and ℓ = -∞; a row without any ends as that too, never as NaN.

The number of splits follows from shapes alone and each split finds its tokens from the lengths on the device, so that
a launch recorded in a CUDA graph stays right while texts grow.

Shapes: N rows, S splits, D numbers of a row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.launch import Config, Launch
from surgery.kernels.online_softmax import LN2, LOG2E
from surgery.kernels.split_count import split_count


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; of anything else a number that gives tests some splits."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 16


def splits_of(
    config: Config, programs: int, query: Tensor, capacity: int, window: int | None = None, *, waves: int = 1
) -> int:
    """Splits of each row's tokens, as configured or from shapes alone.

    Args:
        programs: of the launch without splits.
        query: [B, T, H, ·].
        capacity: the most tokens that a row can have.
        window: latest tokens that a query sees; None for all.
        waves: how many times as many programs as usual are worth it, where they are small.
    """
    if config.splits is not None:
        return config.splits
    reached = capacity if window is None else min(capacity, window + query.shape[1] - 1)
    return split_count(programs, reached, waves * processors(query.device))


def scratch(query: Tensor, width: int, splits: int) -> tuple[Tensor | None, Tensor | None]:
    """Memory for parts of queries [B, T, H, ·]: [B·T·H, splits, width] and [B·T·H, splits] fp32; None for one split."""
    if splits == 1:
        return None, None
    shape = (query.shape[:3].numel(), splits)
    return query.new_empty(*shape, width, dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


def with_merge(launch: Launch, parts: Tensor | None, logs: Tensor | None, out: Tensor, lse: Tensor) -> list[Launch]:
    """A launch and, where it fills `scratch`, the one that merges this into `out` [B, T, H, width] and `lse`."""
    if parts is None:
        return [launch]
    return [replace(launch, scratch=(parts, logs)), merge_launch(parts, logs, out, lse)]


def merge(parts: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """The reference: parts [N, S, D] and logs [N, S] → [N, D] and [N]."""
    lse = logs.logsumexp(dim=-1)
    weights = (logs - lse.unsqueeze(-1)).exp().nan_to_num(0.0)  # -∞ - -∞ where there is no token at all
    return (weights.unsqueeze(-1) * parts).sum(dim=-2), lse


def merge_launch(parts: Tensor, logs: Tensor, out: Tensor, log: Tensor) -> Launch:
    """The launch that fills `out` [N, D], in any dtype, and `log` [N] fp32 from fp32 parts [N, S, D], logs [N, S].

    All are contiguous; N may be several dimensions of `out` and `log`.
    """
    rows, splits, width = parts.shape
    # A tile of all splits must fit into registers: 64 a thread.
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
    """One program: BLOCK_D numbers of one row."""
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
        whole = tl.where(l_i > 0, m_i + tl.log2(tl.where(l_i > 0, l_i, 1.0)) * LN2, -float("inf"))
        tl.store(log + row, whole)


@triton.jit
def split_tokens(low, length, split, splits, BLOCK: tl.constexpr):
    """First and behind-the-last token of a split of the tokens from `low` to `length`, in whole blocks of BLOCK.

    The number of splits is no constant of compilation: it grows with a text.
    """
    each = tl.cdiv(tl.cdiv(length - low, splits), BLOCK) * BLOCK
    start = low + split * each
    return start, tl.minimum(start + each, length)
