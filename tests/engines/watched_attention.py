"""The plugin's attention under the mode that forbids host synchronization, in every layer and step that vLLM runs."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))


def watch() -> Counter[str]:
    """Wrap the forward of every layer and what vLLM's operators, which leave modes, call of it; returns the calls.

    Launches of the project's kernels are counted by the kernel's name and grid, `kernel (x, y, z)`; steps that kernels
    read by the addresses of what a CUDA graph would read again, `memory address address address`.
    """
    from no_host_sync import NoHostSync

    from surgery.kernels import backend, plan
    from surgery_vllm.attention import LatentAttention, QuantizedLatentAttention
    from surgery_vllm.heads import SplitAttention
    from surgery_vllm.heads_backend import PagedHeadsImpl
    from surgery_vllm.latent_rows import LatentRows
    from surgery_vllm.low_rank import LowRankAttention, QuantizedLowRankAttention
    from surgery_vllm.vector_cache import VectorImpl

    if backend.has_triton() and backend.interpreted():
        import interpreter

        interpreter.make_quick()
    calls: Counter[str] = Counter()

    def watched(method: Callable) -> Callable:
        @wraps(method)
        def call(*arguments, **kwargs):
            calls[method.__qualname__] += 1
            steps = getattr(arguments[6], "steps", None) if len(arguments) > 6 else None
            if steps:
                read = (steps.pages, steps.lengths, arguments[6].slot_mapping)
                calls[" ".join(["memory", *(str(tensor.data_ptr()) for tensor in read)])] += 1
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
    for owner in (LatentRows, QuantizedLowRankAttention):
        owner._over_rows = watched(owner._over_rows)
    dispatch = plan._Starter._dispatch

    def counted(starter: plan._Starter, *arguments) -> None:
        calls[f"{starter.launch.kernel.fn.__name__} {starter.launch.grid}"] += 1
        dispatch(starter, *arguments)

    plan._Starter._dispatch = counted
    return calls
