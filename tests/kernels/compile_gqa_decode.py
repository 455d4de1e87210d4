"""Launches of grouped-query decoding for `kernel_checks.compiled`: real models at 128k tokens, and odd head sizes."""

import torch

from surgery.kernels.gqa_decode.kernel import launches
from surgery.kernels.launch import Config, Launch

MODELS = {
    "Llama-2-7B": (32, 32, 128),
    "Llama-3-8B": (32, 8, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "MQA": (32, 1, 128),
    "d=80": (32, 8, 80),
    "d=256": (16, 8, 256),
}
"""Query heads, KV heads, head size."""

CAPACITY = 131_072


def dense() -> dict[str, Launch]:
    """Static caches, in pages of 16 and of 256 tokens, windows, and several new tokens."""
    results = {name: one(*shape) for name, shape in MODELS.items()}
    results["Llama-3-8B, pages of 16"] = one(32, 8, 128, page=16)
    results["Llama-3-8B, pages of 256"] = one(32, 8, 128, page=256)
    results["Llama-3-8B, 16 tokens, window"] = one(32, 8, 128, tokens=16, window=4096)
    results["192/128"] = one(16, 16, 192, value=128)
    return results


def one(
    heads: int,
    groups: int,
    d: int,
    *,
    value: int | None = None,
    page: int | None = None,
    tokens: int = 1,
    window: int | None = None,
    rows: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    config: Config | None = None,
) -> Launch:
    """The attention of one launch, without its merge."""
    value = value or d
    pool = (rows, groups, CAPACITY) if page is None else (rows * CAPACITY // page, groups, page)
    with torch.device("meta"):
        query = torch.empty(rows, tokens, heads, d, dtype=dtype)
        key, values = torch.empty(*pool, d, dtype=dtype), torch.empty(*pool, value, dtype=dtype)
        pages = None if page is None else torch.empty(rows, CAPACITY // page, dtype=torch.int32)
        result = launches(
            query,
            key,
            values,
            d**-0.5,
            out=torch.empty(rows, tokens, heads, value, dtype=dtype),
            lse=torch.empty(rows, tokens, heads),
            lengths=torch.empty(rows, dtype=torch.int32),
            starts=torch.empty(rows, dtype=torch.int32),
            pages=pages,
            window=window,
            config=config,
        )
    return result[0]
