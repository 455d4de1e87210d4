"""Other people's kernels for the same: what ours are held against. Each returns a call that is then measured.

Outputs are [B, T, H, ·] as ours. What a library does not take it refuses with an exception, which a report names.
FlashMLA and FlashInfer are called as their documentation of 2025 says; where they are not installed they are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

SDPA = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "Flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PAGE = 64


@cache
def importable(name: str) -> bool:
    """Whether a library is installed."""
    return find_spec(name) is not None


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, scale: float, backend: str, *, causal: bool = False
) -> Callable[[], Tensor]:
    """PyTorch's attention by one backend alone; query [B, H, T, d], key and value [B, G, S, ·]."""
    width = value.shape[-1]
    if backend == "Flash" and key.shape[-1] != width:
        value = pad(value, (0, key.shape[-1] - width))  # it takes one width only
    grouped = query.shape[1] != key.shape[1]
    if backend == "efficient" and grouped:
        # It knows no groups; views repeat the heads without a copy.
        each = query.shape[1] // key.shape[1]
        key, value = (
            t[:, :, None].expand(-1, -1, each, -1, -1).reshape(t.shape[0], -1, *t.shape[2:]) for t in (key, value)
        )
        grouped = False

    def call() -> Tensor:
        with sdpa_kernel(SDPA[backend]):
            out = scaled_dot_product_attention(
                query, key, value, is_causal=causal, scale=scale, **({"enable_gqa": True} if grouped else {})
            )
        return out[..., :width].transpose(1, 2)

    return call


MOST_COMPILED = 6
"""Shapes that FlexAttention is compiled for in one process: each takes many seconds, and PyTorch gives up after 8."""

_compiled: set[tuple] = set()


@cache
def _compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(query: Tensor, key: Tensor, value: Tensor, scale: float, block_mask=None) -> Callable[[], Tensor]:
    """FlexAttention, compiled; query [B, H, T, d], key and value [B, G, S, ·].

    Raises:
        RuntimeError: it was compiled for `MOST_COMPILED` other shapes already.
    """
    shape = (query.shape, key.shape, query.dtype, block_mask is None)
    if shape not in _compiled and len(_compiled) >= MOST_COMPILED:
        raise RuntimeError(f"compiled for {MOST_COMPILED} shapes already, others would take too long")
    _compiled.add(shape)
    compiled = _compiled_flex()

    def call() -> Tensor:
        out = compiled(query, key, value, scale=scale, block_mask=block_mask, enable_gqa=query.shape[1] != key.shape[1])
        return out.transpose(1, 2)

    return call


def flash_mla(inputs: dict[str, Tensor], scale: float) -> Callable[[], Tensor]:
    """DeepSeek's FlashMLA over pages of 64 tokens; 512 + 64 numbers only."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    query, lengths = inputs["query"], inputs["lengths"]
    cached, table = _paged(torch.cat((inputs["latent"], inputs["rope_key"]), dim=-1))
    metadata, splits = get_mla_metadata(lengths, query.shape[1] * query.shape[2], 1)
    rank = inputs["latent"].shape[-1]

    def call() -> Tensor:
        return flash_mla_with_kvcache(
            query, cached[:, :, None], table, lengths, rank, metadata, splits, softmax_scale=scale, causal=False
        )[0]

    return call


def flashinfer_mla(inputs: dict[str, Tensor], scale: float) -> Callable[[], Tensor]:
    """FlashInfer's MLA over pages of 64 tokens."""
    import flashinfer

    query, latent, lengths = inputs["query"], inputs["latent"], inputs["lengths"]
    rank, rope = latent.shape[-1], inputs["rope_key"].shape[-1]
    latents, table = _paged(latent)
    rope_keys, _ = _paged(inputs["rope_key"])
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(latent.device))
    rows = torch.arange(len(query) + 1, dtype=torch.int32, device=latent.device)
    wrapper.plan(
        rows,
        rows * table.shape[1],
        table.flatten(),
        lengths,
        query.shape[2],
        rank,
        rope,
        PAGE,
        False,
        scale,
        query.dtype,
        latent.dtype,
    )
    nope, rotated = (part.contiguous() for part in query[:, 0].split((rank, rope), dim=-1))
    return lambda: wrapper.run(nope, rotated, latents, rope_keys)[:, None]


def flashinfer_decode(inputs: dict[str, Tensor], scale: float) -> Callable[[], Tensor]:
    """FlashInfer's grouped-query decoding over pages of 64 tokens."""
    import flashinfer

    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    pages = [_paged(tensor.transpose(1, 2)) for tensor in (key, value)]
    table = pages[0][1]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(key.device), "NHD", use_tensor_cores=True)
    rows = torch.arange(len(query) + 1, dtype=torch.int32, device=key.device)
    wrapper.plan(
        rows * table.shape[1],
        table.flatten(),
        (inputs["lengths"] - 1) % PAGE + 1,
        query.shape[2],
        key.shape[1],
        key.shape[-1],
        PAGE,
        sm_scale=scale,
        q_data_type=query.dtype,
        kv_data_type=key.dtype,
    )
    cached, rows_of_queries = (pages[0][0], pages[1][0]), query[:, 0].contiguous()
    return lambda: wrapper.run(rows_of_queries, cached)[:, None]


def _paged(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, S, ...] as pages [P, 64, ...] and the pages of each row, int32 [B, n]."""
    batch, total = tokens.shape[:2]
    each = math.ceil(total / PAGE)
    padded = pad(tokens, (0,) * 2 * (tokens.ndim - 2) + (0, each * PAGE - total))
    table = torch.arange(batch * each, dtype=torch.int32, device=tokens.device).view(batch, each)
    return padded.reshape(batch * each, PAGE, *tokens.shape[2:]).contiguous(), table


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(256 << 20, dtype=torch.uint8, device=device)
