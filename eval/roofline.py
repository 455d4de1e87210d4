"""How fast a pass could be at best on this machine: the roofline (Williams, Waterman and Patterson 2009, CACM 52(4)).

A pass that moves a number of bytes and does a number of FLOPs takes at least the longer of the two at the machine's
ceilings, which are measured here rather than read from a data sheet. Counted are

- bytes: every weight that a pass reads, once, and the bytes of the live cache, once. Not activations, nor the copies
  that a growing cache makes of itself.
- FLOPs: matrix products and attention of the pass as the model does them, two a multiply-add; half of the scores where
  attention is causal by a flag rather than by a mask. Not norms, RoPE, softmax, nor kernels that are unknown to
  PyTorch's `FlopCounterMode` (Triton's): with those the bound is too high, but still a bound.

The bound is one of the implementation that is run. Stock MLA of transformers expands all cached latents to keys and
values at every decoded token; its FLOPs count, so that its bound lies far below the one of absorbed MLA. Bandwidth is
that of memory: a model that fits in a CPU's cache may exceed its bound.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from surgery.eval.tensor_bytes import plain_tensors, storage_bytes, weight_tensors

BUFFER_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
"""What is copied for the bandwidth: much more than a last-level cache holds, on most machines."""
REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """What a machine reaches.

    Attributes:
        bytes_per_second: of copying, reads and writes both counted.
        flops_per_second: of square matrix products in the model's dtype, at the best of several sizes.
    """

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Bound:
    """The least time of a pass.

    Attributes:
        seconds: no pass is faster, within what is counted.
        by: what takes that long.
    """

    seconds: float
    by: Literal["memory", "compute"]


def bound(moved_bytes: float, flops: float, ceilings: Ceilings) -> Bound:
    """The least time in which `moved_bytes` and `flops` can be done, at the same time."""
    memory, compute = moved_bytes / ceilings.bytes_per_second, flops / ceilings.flops_per_second
    return Bound(memory, "memory") if memory >= compute else Bound(compute, "compute")


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Medians of short runs, about a second; once a process for each device, dtype and number of threads."""
    return _measure_ceilings(torch.device(device), dtype, torch.get_num_threads())


def bytes_read(model: nn.Module, tokens: int) -> float:
    """Bytes of weights that one pass over `tokens` tokens reads, each once.

    The input embedding is left out, as a pass looks up a few of its rows, unless it is tied to the output head. Of the
    experts of a mixture a token reads `num_experts_per_tok`; as many different ones are counted as `tokens` tokens
    reach on average if every set of experts is equally likely. Many tokens therefore read them all. Experts are modules
    called `experts`, as in transformers; where the config does not tell how many a token uses, all count.
    """
    embedding, head = model.get_input_embeddings(), _head(model)
    skipped = set() if getattr(head, "weight", None) is embedding.weight else _storages(embedding)
    experts = [part for name, part in model.named_modules() if name.endswith(".experts")]
    in_experts = set().union(*map(_storages, experts))
    dense, routed = [], []
    for tensor in weight_tensors(model):
        storage = _storage(tensor)
        if storage not in skipped:
            (routed if storage in in_experts else dense).append(tensor)
    return storage_bytes(dense) + storage_bytes(routed) * share_of_experts(getattr(model, "config", None), tokens)


class FlopCount:
    """Counts the FLOPs of the matrix products and the attention done inside `with`.

    Attributes:
        flops: after the `with`.
    """

    def __init__(self) -> None:
        self.flops = 0
        self._mode = FlopCounterMode(display=False, custom_mapping=_formulas())

    def __enter__(self) -> FlopCount:
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)
        self.flops = self._mode.get_total_flops()


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


@cache
@torch.no_grad()
def _measure_ceilings(device: torch.device, dtype: torch.dtype, threads: int) -> Ceilings:
    # Weights of 8 bits and less are expanded before they are multiplied, unless special kernels are at work.
    return Ceilings(_copy_bandwidth(device), _matmul_rate(device, dtype if dtype.itemsize > 1 else torch.bfloat16))


def _copy_bandwidth(device: torch.device) -> float:
    size = BUFFER_BYTES.get(device.type, BUFFER_BYTES["cpu"])
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)  # written, so that its pages exist
    return 2 * size / _median_seconds(lambda: target.copy_(source), device)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second at the best of sizes 256, 512, ...; the size grows only while a product is quick."""
    best, size, seconds = 0.0, 256, 0.0
    while size <= 8192 and seconds < 0.02:
        matrix = torch.randn(size, size, device=device).to(dtype)
        seconds = _median_seconds(lambda matrix=matrix: matrix @ matrix, device)
        best = max(best, 2 * size**3 / seconds)
        size *= 2
    return best


def _median_seconds(function: Callable[[], Any], device: torch.device) -> float:
    function()
    seconds = []
    for _ in range(REPEATS):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    return find() if find is not None else None


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _storages(module: nn.Module) -> set[tuple[torch.device, int]]:
    return {_storage(tensor) for tensor in plain_tensors(list(module.parameters()))}


def share_of_experts(config: Any, tokens: int = 1) -> float:
    """The expected share of experts that `tokens` tokens reach: a token misses any one with probability 1 - k / n."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    used = getattr(config, "num_experts_per_tok", None)
    return 1.0 if not count or not used else 1.0 - (1.0 - used / count) ** tokens


def _formulas() -> dict[Any, Callable[..., int]]:
    """FLOPs of what PyTorch's counter leaves out (attention on a CPU, grouped products) or takes for not causal.

    The operators' arguments come positionally, tensors as their shapes; defaults are left out.
    """
    aten, transformers = torch.ops.aten, torch.ops.transformers
    causal_at = {
        "_scaled_dot_product_flash_attention_for_cpu": 4,
        "_scaled_dot_product_flash_attention": 4,
        "_scaled_dot_product_efficient_attention": 6,
        "_scaled_dot_product_cudnn_attention": 6,
    }
    formulas: dict[Any, Callable[..., int]] = {}
    for name, place in causal_at.items():
        if hasattr(aten, name):
            formulas[getattr(aten, name)] = _attention_flops(place)
    for library, name in ((aten, "_grouped_mm"), (transformers, "grouped_mm_fallback")):
        if hasattr(library, name):
            formulas[getattr(library, name)] = _grouped_flops
    return formulas


def _attention_flops(causal_at: int) -> Callable[..., int]:
    def flops(*args: Any, is_causal: bool = False, **_: Any) -> int:
        (batch, heads, queries, head_dim), (_, _, keys, _), value = args[:3]
        if len(args) > causal_at:
            is_causal = args[causal_at]
        # Query i of n sees i + 1 keys.
        scores = queries * (queries + 1) // 2 if is_causal and queries == keys else queries * keys
        return 2 * batch * heads * scores * (head_dim + value[-1])

    return flops


def _grouped_flops(tokens: torch.Size, weights: torch.Size, *_: Any, **__: Any) -> int:
    """Tokens [S, K], each times one of the matrices [E, K, N]."""
    return 2 * tokens[0] * tokens[1] * weights[-1]
