"""GPU timing: medians over CUDA graph replays with rotating buffers, and measured bandwidth and compute ceilings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ROTATION = 4
"""Size of the inputs of one replay as a multiple of the L2 cache, so that no input is still cached."""
LEAST_SECONDS = 200e-6
"""Minimum duration of a replay, for the resolution of CUDA events."""
MOST_CALLS = 256
SECONDS = 0.25
"""Approximate duration of a measurement."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median over replays, and the 10th and 90th percentile.

    Calls replay a CUDA graph or are launched one after the other, and rotate through sets of inputs.
    """

    seconds: float
    low: float
    high: float
    graph: bool
    sets: int


def device_facts(device: torch.device) -> dict:
    """Return the properties of the device for a report."""
    if device.type != "cuda":
        return {"name": "CPU", "processors": 0, "memory_bytes": 0, "l2_bytes": 0, "capability": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "processors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "capability": f"{properties.major}.{properties.minor}",
    }


def ceilings(device: torch.device) -> dict:
    """Measure bytes/s of a copy, counting reads and writes, and FLOP/s of a bf16 matmul of random data."""
    return {**_copy_rate(device), **_matmul_rate(device)}


def _copy_rate(device: torch.device) -> dict:
    size = min(4 << 30, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    timing = time_calls([lambda: target.copy_(source)], device)
    return {"bytes_per_second": 2 * size / timing.seconds, "copy_bytes": size}


def _matmul_rate(device: torch.device) -> dict:
    width = 8192
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    timing = time_calls([lambda: torch.mm(a, b, out=product)], device)
    return {"flops_per_second": 2 * width**3 / timing.seconds, "matmul_width": width}


def sets_needed(input_bytes: int, device: torch.device) -> int:
    """Return the number of input sets that fill `ROTATION` times the L2 cache; fewer if memory is short."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    free = torch.cuda.mem_get_info(device)[0]
    count = math.ceil(ROTATION * cache / max(input_bytes, 1))
    return max(1, min(count, MOST_CALLS, int(0.4 * free / max(input_bytes, 1))))


def time_calls(calls: Sequence[Callable[[], object]], device: torch.device) -> Timing:
    """Measure the seconds per call of `calls`, the same call with different inputs; 5 to 200 replays in `SECONDS`."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # compile and allocate before capture
        for call in (*calls, *calls[:2]):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    once = _elapsed(lambda: [call() for call in calls], device) / len(calls)
    rounds = max(1, min(math.ceil(LEAST_SECONDS / max(once * len(calls), 1e-9)), MOST_CALLS // len(calls) or 1))
    order = list(calls) * rounds

    def all_calls() -> None:
        for call in order:
            call()

    replay, graph = _recorded(all_calls)
    for _ in range(2):
        replay()
    torch.cuda.synchronize(device)
    each = _elapsed(replay, device)
    times = [_elapsed(replay, device) / len(order) for _ in range(max(5, min(200, int(SECONDS / max(each, 1e-9)))))]
    cut = statistics.quantiles(times, n=10)
    return Timing(statistics.median(times), cut[0], cut[-1], graph, len(calls))


def _recorded(function: Callable[[], None]) -> tuple[Callable[[], None], bool]:
    """Capture the function in a CUDA graph; return its replay and True, or the function and False if capture fails."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except Exception:
        torch.cuda.synchronize()
        return function, False
    return graph.replay, True


def _elapsed(function: Callable[[], object], device: torch.device) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    function()
    stop.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(stop) / 1e3
