"""Number of programs that share the tokens of a row, from shapes alone; without torch, for predictions."""

from __future__ import annotations

LEAST_TOKENS = 512
"""Tokens of a split below which merging costs more than the split saves: its fp32 part is written and read again."""

MOST_SPLITS = 128


def split_count(programs: int, tokens: int, processors: int) -> int:
    """Splits for a launch: enough for two waves of programs, none shorter than `LEAST_TOKENS` at full length.

    Args:
        programs: of the launch without splits.
        tokens: the most tokens that a row can have (the cache's capacity, not its length).
        processors: multiprocessors of the GPU.

    Returns:
        A power of two from 1 to `MOST_SPLITS`, so that few kernels are compiled.
    """
    count = min(2 * processors // max(programs, 1), tokens // LEAST_TOKENS, MOST_SPLITS)
    return 1 << (max(count, 1).bit_length() - 1)
