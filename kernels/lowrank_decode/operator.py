"""Operator `surgery::lowrank_decode`: attention over keys rebuilt from latents, next to full-precision tokens.

    lowrank_decode(query, latent, key_up, scale, *, ...) -> (out, exact_out, lse)

With c_n the latent of the token at position n, U_g `key_up` and R_n the rotation of position n, KV head g has

    k_g(n) = R_n norm(U_g c_n + key_bias_g)        v_g(n) = value_up_g c_n + value_bias_g

with one softmax over rebuilt and full-precision tokens. The caller computes the attention output as

    value_up_g · out + exact_out (+ value_bias_g, if exact values lack it too)

Inputs from the caches of this package:

- Low rank and cascades: latents [B, S, r], those of a cascade's layers concatenated; `ranges` for blocks of ranks; no
  full-precision tokens.
- Low rank with a residual window: also `sinks`, `window` and the tokens of `ResidualWindowLayer`, whose keys lack only
  the rotation; empty positions are -1.
- Bases shared by several layers: latents [B, S, r], as `key_up` the rows of `basis_up` that give keys, as `rebuilt`
  [sinks, start of the block], as full-precision tokens those of `GroupLayer` with `raw_exact`.
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
    first: Tensor | None = None,
    rebuilt: Tensor | None = None,
    window: int = 0,
    sinks: int = 0,
    exact_key: Tensor | None = None,
    exact_value: Tensor | None = None,
    exact_slots: Tensor | None = None,
    raw_exact: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    r"""Compute attention of the last T tokens of each row over rebuilt keys, with the latents as values.

    Positions count padding; the query of new token t is at position m = lengths - T + t. It reads position n as a
    rebuilt token if ``low ≤ n < stop`` and ``n ≤ m - window``, and any other position from ``starts`` to m as an exact
    token, if given. A token that is given in both forms is read in one only.

    Args:
        query: [B, T, H, d], normalized and rotated to its positions.
        latent: [B, S, R]; the last dimension contiguous. latent[:, i] belongs to position ``first + i``.
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
        first: int32 [B], position of latent[:, 0]; None for 0.
        rebuilt: int32 [B, 2], low and stop; None for starts + `sinks` and lengths. Needs `lengths`.
        window: latest tokens of a query, itself included, that are read exactly (0 for none).
        sinks: first tokens that are read exactly; unused with `rebuilt`.
        exact_key, exact_value: [B, G, E, d] and [B, G, E, v], the keys not rotated; given together with `exact_slots`.
        exact_slots: int32 [B, E], positions of the full-precision tokens in any order; -1 for an empty slot.
        raw_exact: exact keys lack bias and norm, so the kernel applies them.

    Returns:
        out [B, T, H, r_v], the latents times the softmax weights of rebuilt tokens; exact_out [B, T, H, v], the exact
        values times those of full-precision tokens, or None; lse [B, T, H] fp32, the logarithm of the sum of
        exponentials over both. out = 0 and lse = -inf if a query sees no token. out and exact_out are in the
        query's dtype.

    Raises:
        ValueError: inconsistent shapes.
    """
    within, begins = (None, None) if rotation is None else rotation
    both, lse = _lowrank_decode(
        query, latent, key_up, scale, within, begins, key_bias, norm_weight, norm_eps, _flatten_ranges(ranges), lengths,
        starts, first, rebuilt, window, sinks, exact_key, exact_value, exact_slots, raw_exact,
    )  # fmt: skip
    return _split_outputs(both, lse, exact_value)


def _flatten_ranges(ranges: Sequence[tuple[int, int, int, int]] | None) -> tuple[int, ...] | None:
    return None if ranges is None else tuple(chain.from_iterable(ranges))


def _split_outputs(both: Tensor, lse: Tensor, exact_value: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Split the output of the registered operator into latents and exact values."""
    if exact_value is None:
        return both, None, lse
    return *both.split([both.shape[-1] - (width := exact_value.shape[-1]), width], dim=-1), lse


def _outputs(call: SimpleNamespace) -> tuple[Tensor, Tensor]:
    value_rank = call.latent.shape[-1] if call.ranges is None else max(call.ranges[3::4])
    exact = 0 if call.exact_value is None else call.exact_value.shape[-1]
    out, lse = attention_outputs(call.query, value_rank + exact)
    return out, lse.new_empty(lse.shape, dtype=torch.float32)


def _unsupported(call: SimpleNamespace) -> str | None:
    query, latent, key_up, exact_value = call.query, call.latent, call.key_up, call.exact_value
    same = [query, key_up, call.exact_key, exact_value, latent]
    if len({tensor.dtype for tensor in same if tensor is not None}) > 1:
        return "queries, latents, up-projection and full-precision tokens differ in dtype"
    if any(tensor is not None and tensor.stride(-1) != 1 for tensor in same):
        return "the last dimension of a tensor is not contiguous"
    if query.shape[-1] > 256 or (exact_value is not None and exact_value.shape[-1] > 256):
        return "the head size of queries or full-precision values exceeds 256"
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
    if call.rebuilt is not None and call.lengths is None:
        _refuse("`rebuilt` requires `lengths`")
    if call.window < 0 or call.sinks < 0:
        _refuse(f"window and sinks must be at least 0, not {call.window} and {call.sinks}")


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
    shapes = {"key_bias": (kv_heads, dim), "norm_weight": (dim,), "rebuilt": (batch, 2)}
    shapes |= dict.fromkeys(("lengths", "starts", "first"), (batch,))
    exact = (call.exact_key, call.exact_value, call.exact_slots)
    if any(tensor is not None for tensor in exact):
        if any(tensor is None for tensor in exact):
            _refuse("exact_key, exact_value and exact_slots must be passed together")
        count = exact[0].shape[2]
        shapes |= {"exact_key": (batch, kv_heads, count, dim), "exact_slots": (batch, count)}
        shapes["exact_value"] = (batch, kv_heads, count, exact[1].shape[-1])
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
    growth=({"latent": 1}, {"exact_key": 2, "exact_value": 2, "exact_slots": 1}, {"begins": 1}),
)
"""Registered operator; returns out and exact_out concatenated [B, T, H, r_v + v], and lse [B, T, H]."""
