"""Launches of grouped-query decoding for `kernel_checks.compiled`: real models at 128k tokens, and odd head sizes."""

import torch

from surgery.kernels.gqa_decode.kernel import launches
from surgery.kernels.gqa_decode_quantized import kernel as gqa_decode_quantized
from surgery.kernels.launch import Config, Launch
from surgery.kernels.quantization import BITS

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


def quantized() -> dict[str, Launch]:
    """The formats by channel in groups of 32 tokens, one by token, and one of larger groups."""
    results = {}
    for name in ("Llama-2-7B", "Llama-3-8B", "Qwen2.5-7B"):
        for format in ("int8", "int4", "fp8"):
            results[f"{name} {format}"] = coded(*MODELS[name], format)
    results["Llama-3-8B int2"] = coded(*MODELS["Llama-3-8B"], "int2")
    results["Llama-3-8B int8 by token"] = coded(*MODELS["Llama-3-8B"], "int8", keys="token")
    results["Llama-3-8B int4, groups of 128"] = coded(*MODELS["Llama-3-8B"], "int4", group=128)
    results["d=256 int8"] = coded(*MODELS["d=256"], "int8")
    return results


def coded(
    heads: int,
    groups: int,
    d: int,
    format: str,
    *,
    group: int = 32,
    keys: str = "channel",
    rows: int = 8,
    splits: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    config: Config | None = None,
) -> Launch:
    """The attention of one launch over codes, without its merge."""
    numbers = CAPACITY * BITS[format] // 8
    with torch.device("meta"):
        query = torch.empty(rows, 1, heads, d, dtype=dtype)
        codes = torch.empty(rows, groups, numbers, d, dtype=torch.uint8)
        value_scale = torch.empty(rows, groups, CAPACITY, -(-d // group), dtype=dtype)
        by_channel = torch.empty(rows, groups, CAPACITY // group, d, dtype=dtype)
        key_scale = by_channel if keys == "channel" else value_scale
        zeros = (None, None) if format == "fp8" else (key_scale, value_scale)
        result = gqa_decode_quantized.launches(
            query,
            codes,
            key_scale,
            zeros[0],
            codes,
            value_scale,
            zeros[1],
            d**-0.5,
            format=format,
            group=group,
            keys=keys,
            lengths=torch.empty(rows, dtype=torch.int32),
            splits=splits,
            out=torch.empty(rows, 1, heads, d, dtype=dtype),
            lse=torch.empty(rows, 1, heads),
            config=config,
        )
    return result[0]
