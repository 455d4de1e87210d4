"""The plugin's attention under the mode that forbids host synchronization, in every layer and step that vLLM runs."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))


def watch() -> Counter[str]:
    """Wrap the forward of every layer and what vLLM's operators, which leave modes, call of it; returns the calls."""
    from no_host_sync import NoHostSync

    from surgery_vllm.attention import LatentAttention, QuantizedLatentAttention
    from surgery_vllm.heads import SplitAttention
    from surgery_vllm.heads_backend import PagedHeadsImpl
    from surgery_vllm.low_rank import LowRankAttention
    from surgery_vllm.vector_cache import VectorImpl

    calls: Counter[str] = Counter()

    def watched(method: Callable) -> Callable:
        @wraps(method)
        def call(*arguments, **kwargs):
            calls[method.__qualname__] += 1
            with NoHostSync():
                return method(*arguments, **kwargs)

        return call

    for owner in (
        QuantizedLatentAttention,
        LatentAttention,
        SplitAttention,
        LowRankAttention,
        PagedHeadsImpl,
        VectorImpl,
    ):
        owner.forward = watched(owner.forward)
    return calls
