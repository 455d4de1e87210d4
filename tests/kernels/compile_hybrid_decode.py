"""Launches of decoding over full and streaming heads, for `kernel_checks.compiled`."""

import torch

from surgery.kernels.hybrid_decode.kernel import launches
from surgery.kernels.launch import Launch

CACHED = 131_072


def hybrid_decode_launches() -> dict[str, Launch]:
    """Half of the heads of Llama-2-7B and Llama-3-8B streaming: one new token and eight, split and not."""
    cases = {}
    models = {"llama-2-7b": (32, 32, 128), "llama-3-8b": (32, 8, 128)}
    for name, shape in models.items():
        cases[name] = _launches(*shape, sinks=64, recent=256, splits=16)
        cases[f"{name}, 8 tokens, padded"] = _launches(*shape, sinks=16, recent=1024, tokens=8, splits=16, padded=True)
        cases[f"{name}, 64 rows"] = _launches(*shape, sinks=128, recent=1024, rows=64, splits=1)
    cases["float32"] = _launches(32, 8, 128, sinks=64, recent=256, splits=16, dtype=torch.float32)
    cases["no power of two"] = _launches(28, 4, 96, sinks=64, recent=256, splits=16)
    return {f"{name}: {launch.kernel.fn.__name__}": launch for name, result in cases.items() for launch in result}


def _launches(
    heads, groups, head_size, *, sinks, recent, splits, rows=1, tokens=1, padded=False, dtype=torch.bfloat16
) -> list[Launch]:
    half, slots = groups // 2, sinks + recent - 1 + tokens
    with torch.device("meta"):
        query = torch.empty(rows, tokens, heads, head_size, dtype=dtype)
        full = [torch.empty(rows, half, CACHED, head_size, dtype=dtype) for _ in range(2)]
        streaming = [torch.empty(rows, groups - half, slots, head_size, dtype=dtype) for _ in range(2)]
        return launches(
            query,
            *full,
            *streaming,
            head_size**-0.5,
            sinks,
            sinks,
            recent,
            torch.empty(rows, dtype=torch.int32),
            torch.empty(rows, dtype=torch.int32) if padded else None,
            splits,
            out=torch.empty_like(query),
            lse=torch.empty(rows, tokens, heads),
        )
