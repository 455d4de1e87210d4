"""Launches of attention to sinks and windows, for `kernel_checks.compiled`."""

import torch

from surgery.kernels.launch import Launch
from surgery.kernels.sink_recent_prefill.kernel import launches


def sink_recent_prefill_launches() -> dict[str, Launch]:
    """Whole texts of 131,072 tokens; how many sinks and recent tokens a head has, the device alone knows."""
    return {
        "llama-2-7b": _launch(32, 32, 128),
        "llama-3-8b": _launch(32, 8, 128),
        "llama-3-8b, padded": _launch(32, 8, 128, padded=True),
        "llama-3-8b, float16, a chunk of 1000": _launch(32, 8, 128, tokens=1000, dtype=torch.float16),
        "28 heads of 96": _launch(28, 4, 96),
        "heads of 64": _launch(32, 8, 64),
        "heads of 256": _launch(16, 8, 256),
        "float32": _launch(32, 8, 128, dtype=torch.float32),
    }


def _launch(heads, groups, head_size, *, tokens=131_072, padded=False, dtype=torch.bfloat16) -> Launch:
    with torch.device("meta"):
        key, value = (torch.empty(2, groups, 131_072, head_size, dtype=dtype) for _ in range(2))
        (launch,) = launches(
            torch.empty(2, heads, tokens, head_size, dtype=dtype),
            key,
            value,
            head_size**-0.5,
            torch.empty(groups, dtype=torch.int32),
            torch.empty(groups, dtype=torch.int32),
            torch.empty(2, dtype=torch.int32) if padded else None,
            out=torch.empty(2, tokens, heads, head_size, dtype=dtype),
            lse=torch.empty(2, heads, tokens),
        )
    return launch
