"""Number of split-KV programs per row, from shapes alone; free of torch imports, for latency predictions."""

from __future__ import annotations

LEAST_TOKENS = 512
"""Minimum tokens per split; below, writing and reading its fp32 partial result takes longer than the split saves."""

MOST_SPLITS = 128


def split_count(programs: int, tokens: int, processors: int) -> int:
    """Return the number of splits for up to two waves of programs, with at least `LEAST_TOKENS` tokens per split.

    Args:
        programs: programs of the launch without splits.
        tokens: capacity of a row in the cache, not its current length.
        processors: streaming multiprocessors of the GPU.

    Returns:
        A power of two from 1 to `MOST_SPLITS`, so that few kernels are compiled.
    """
    count = min(2 * processors // max(programs, 1), tokens // LEAST_TOKENS, MOST_SPLITS)
    return 1 << (max(count, 1).bit_length() - 1)
