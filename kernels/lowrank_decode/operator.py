"""Operator `surgery::lowrank_decode`: attention over keys rebuilt from latents.

    lowrank_decode(query, latent, key_up, scale, *, ...) -> (out, lse)

With c_n the latent of the token at position n, U_g `key_up` and R_n the rotation of position n, KV head g has

    k_g(n) = R_n norm(U_g c_n + key_bias_g)        v_g(n) = value_up_g c_n + value_bias_g

The caller computes the attention output as value_up_g · out + value_bias_g. `ranges` are for blocks of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace

import torch
from torch import Tensor

from surgery.kernels.lowrank_decode.reference import STEP, lowrank_attention, rotation_tables
from surgery.kernels.operation import Operation, attention_outputs

__all__ = ["lowrank_decode", "rotation_tables"]


def lowrank_decode(
    query: Tensor,
    latent: Tensor,
    key_up: Tensor,
    scale: float,
    *,
    rotation: tuple[Tensor, Tensor] | None = None,
    key_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    ranges: Sequence[tuple[int, int, int, int]] | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Compute attention of the last T tokens of each row over rebuilt keys, with the latents as values.

    Positions count padding; the query of new token t is at position m = lengths - T + t. It reads the positions
    from ``starts`` to m.

    Args:
        query: [B, T, H, d], normalized and rotated to its positions.
        latent: [B, S, R]; the last dimension contiguous.
        key_up: [G, d, r_k]; r_k = R without `ranges`. Query head h reads KV head h // (H // G).
        scale: multiplies the logits; includes the rotary embedding's attention scaling of the keys.
        rotation: `rotation_tables(inv_freq, positions)` for at least as many positions as there are; None for no
            rotation. Elements i and i + d/2 of a head are rotated together.
        key_bias: [G, d], added to rebuilt keys before the norm.
        norm_weight, norm_eps: weight [d] and epsilon of an RMS norm of rebuilt keys; None for no norm.
        ranges: for each KV head the first latent element and the rank that its key reads, then those of its value. Key
            ranks are at most r_k; r_v is the largest value rank, and `out` is 0 past a head's own. None: both read all
            R. Multiples of 8 or 16 load fastest; equal ranges of key and value are loaded once.
        lengths: int32 [B], tokens of each row, the new ones included; None for S.
        starts: int32 [B], first position that is no padding; None for 0.

    Returns:
        out [B, T, H, r_v] in the query's dtype, the attention-weighted latents; lse [B, T, H] fp32, the logarithm of
        the sum of exponentials. out = 0 and lse = -inf if a query sees no token.

    Raises:
        ValueError: inconsistent shapes.
    """
    within, begins = (None, None) if rotation is None else rotation
    flat = None if ranges is None else tuple(chain.from_iterable(ranges))
    return _lowrank_decode(
        query, latent, key_up, scale, within, begins, key_bias, norm_weight, norm_eps, flat, lengths, starts
    )


def _outputs(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    value_rank = call.latent.shape[-1] if call.ranges is None else max(call.ranges[3::4])
    out, lse = attention_outputs(call.query, value_rank)
    return out, lse.new_empty(lse.shape, dtype=torch.float32)


def _unsupported(call: SimpleNamespace) -> str | None:
    query, latent, key_up = call.query, call.latent, call.key_up
    if len({tensor.dtype for tensor in (query, latent, key_up)}) > 1:
        return "queries, latents and up-projection differ in dtype"
    if any(tensor.stride(-1) != 1 for tensor in (query, latent, key_up)):
        return "the last dimension of a tensor is not contiguous"
    if query.shape[-1] > 256:
        return "the head size exceeds 256"
    if key_up.shape[-1] > 2048 or not query.shape[1] or not latent.shape[1]:
        return f"no tokens, or a key rank above 2048: latents {list(latent.shape)}, key rank {key_up.shape[-1]}"
    return None


def _refuse(what: str) -> None:
    raise ValueError(f"lowrank_decode: {what}")


def _check(call: SimpleNamespace) -> None:
    query, latent, key_up = call.query, call.latent, call.key_up
    if query.ndim != 4 or latent.ndim != 3 or key_up.ndim != 3 or query.shape[0] != latent.shape[0]:
        _refuse(
            f"query must be [B, T, H, d], latent [B, S, R] and key_up [G, d, r], not {list(query.shape)}, "
            f"{list(latent.shape)} and {list(key_up.shape)}"
        )
    heads, dim, (kv_heads, up_dim, _) = query.shape[2], query.shape[3], key_up.shape
    if up_dim != dim or dim % 2 or kv_heads < 1 or heads % kv_heads:
        _refuse(
            "head sizes must be equal and even, and query heads a multiple of KV heads, not "
            f"{heads} query heads of size {dim} and {kv_heads} KV heads of size {up_dim}"
        )
    _check_ranges(call.ranges, kv_heads, latent.shape[2], key_up.shape[2])
    _check_shapes(call, len(query), kv_heads, dim)


def _check_ranges(ranges: Sequence[int] | None, kv_heads: int, width: int, key_rank: int) -> None:
    if ranges is None:
        if key_rank != width:
            _refuse(f"key_up has rank {key_rank}, latents have {width} elements: pass `ranges`")
    elif (
        len(ranges) != 4 * kv_heads
        or min(ranges) < 0
        or max(ranges[1::4]) > key_rank
        or any(first + rank > width for first, rank in zip(ranges[::2], ranges[1::2], strict=True))
    ):
        _refuse(f"ranges must be 4 integers per KV head ({kv_heads}), within {width} latents and key rank {key_rank}")


def _check_shapes(call: SimpleNamespace, batch: int, kv_heads: int, dim: int) -> None:
    within, begins = call.within, call.begins
    if within is not None and (within.shape != (2, STEP, dim // 2) or begins.shape[::2] != within.shape[::2]):
        _refuse("rotation must be the result of rotation_tables for this head size")
    shapes = {"key_bias": (kv_heads, dim), "norm_weight": (dim,), "lengths": (batch,), "starts": (batch,)}
    for name, shape in shapes.items():
        tensor = getattr(call, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            _refuse(f"{name} must be {list(shape)}, not {list(tensor.shape)}")


_lowrank_decode = Operation(
    "lowrank_decode",
    lowrank_attention,
    _outputs,
    _unsupported,
    _check,
    kernel="surgery.kernels.lowrank_decode.launches",
    growth=({"latent": 1}, {"begins": 1}),
)
