"""Launches of attention over rebuilt keys, for `kernel_checks.compiled`: bf16, 128k tokens."""

from dataclasses import replace

import torch

from surgery.kernels.launch import Launch
from surgery.kernels.lowrank_decode.launches import default_config
from surgery.kernels.lowrank_decode.launches import launches as launches_of


def launch(heads, kv_heads, dim, key_rank, *, width=None, norm=False, capability=90) -> Launch:
    """The first launch for latents of `width` numbers, of which each KV head reads `key_rank`."""
    batch, tokens, capacity, blockwise = 2, 1, 131_072, width is not None and width != key_rank
    bf16, ints = {"dtype": torch.bfloat16}, {"dtype": torch.int32}
    width = width or key_rank
    value_rank = key_rank
    ranks = {"dim": dim, "key_rank": key_rank, "value_rank": value_rank}
    config = default_config(**ranks, dtype=torch.bfloat16, capability=capability)
    config = replace(config, splits=8)
    with torch.device("meta"):
        options = {"within": torch.empty(2, 128, dim // 2), "begins": torch.empty(2, capacity // 128, dim // 2)}
        options |= {"lengths": torch.empty(batch, **ints), "starts": torch.empty(batch, **ints)}
        latent = torch.empty(batch, capacity, width, **bf16)
        if blockwise:
            begins = [
                head * key_rank * (width // key_rank) // kv_heads // key_rank * key_rank for head in range(kv_heads)
            ]
            options["ranges"] = [number for first in begins for number in (first, key_rank, first, key_rank)]
        if norm:
            options |= {"norm_weight": torch.empty(dim, **bf16), "norm_eps": 1e-6}
            options |= {"key_bias": torch.empty(kv_heads, dim, **bf16)}
        return launches_of(
            torch.empty(batch, tokens, heads, dim, **bf16),
            latent,
            torch.empty(kv_heads, dim, key_rank, **bf16),
            dim**-0.5,
            **options,
            out=torch.empty(batch, tokens, heads, value_rank, **bf16),
            lse=torch.empty(batch, tokens, heads),
            config=config,
        )[0]


def few(capability: int) -> dict[str, Launch]:
    """One of each way through the kernel."""
    return {
        "blocks of two heads": launch(32, 8, 128, 256, width=1024, capability=capability),
        "joint": launch(32, 8, 128, 512, capability=capability),
        "odd rank": launch(8, 4, 32, 48, norm=True, capability=capability),
    }


def more(capability: int) -> dict[str, Launch]:
    """The shapes of the models that are converted most."""
    results = {
        "Llama-3-8B, joint 1024": launch(32, 8, 128, 1024, capability=capability),
        "Llama-2-7B, blocks of four heads": launch(32, 32, 128, 1024, width=8192, capability=capability),
    }
    shapes = {"Llama-3-8B, blocks of two heads": (32, 8, 128, 256), "Qwen2.5-7B, one head": (28, 4, 128, 128)}
    for name, shape in shapes.items():
        width = 1024 if shape[1] == 8 else 512
        results[name] = launch(*shape, width=width, capability=capability)
    return results
