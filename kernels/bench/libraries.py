"""Baselines of the benchmark: PyTorch's attention kernels. Each function returns the call to time.

Outputs are [B, T, H, ·] as ours. Unsupported inputs raise an exception, which the report names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from surgery.kernels.bench.case import Baseline, Inputs

SDPA = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "Flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, backend: str) -> Callable[[], Tensor]:
    """Return a call of PyTorch's SDPA with a single backend; query [B, H, T, d], key and value [B, G, S, d]."""
    if backend == "efficient":  # no GQA support, so expand the KV heads
        repeat = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeat, 1) for part in (key, value))

    def call() -> Tensor:
        with sdpa_kernel(SDPA[backend]):
            grouped = query.shape[1] != key.shape[1]
            return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=grouped).transpose(1, 2)

    return call


def all_sdpa(arguments: Callable[[Inputs], tuple[Tensor, Tensor, Tensor]], scale: float) -> dict[str, Baseline]:
    """Return `sdpa` baselines for every backend; `arguments` maps a case's inputs to query, key and value."""
    return {f"SDPA {name}": lambda inputs, name=name: sdpa(*arguments(inputs), scale, name) for name in SDPA}


MOST_COMPILED = 6
"""Maximum shapes that FlexAttention is compiled for in a process: each takes many seconds; PyTorch's limit is 8."""

_compiled: set[tuple] = set()


@cache
def _compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Callable[[], Tensor]:
    """Return a call of compiled FlexAttention; query [B, H, T, d], key and value [B, G, S, ·].

    Raises RuntimeError: already compiled for `MOST_COMPILED` other shapes.
    """
    shape = (query.shape, key.shape, query.dtype)
    if shape not in _compiled and len(_compiled) >= MOST_COMPILED:
        raise RuntimeError(f"skipped: {MOST_COMPILED} shapes are compiled already, and each takes many seconds")
    _compiled.add(shape)
    compiled = _compiled_flex()

    def call() -> Tensor:
        out = compiled(query, key, value, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        return out.transpose(1, 2)

    return call
