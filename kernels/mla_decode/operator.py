"""Operator `surgery::mla_decode`: absorbed MLA decode attention over a contiguous or paged latent cache."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from surgery.kernels.checks import check_counts, check_pages
from surgery.kernels.mla_decode.reference import ragged_latent_attention
from surgery.kernels.operation import Operation, attention_outputs


def mla_decode(
    query: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    scale: float,
    *,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    pages: Tensor | None = None,
    key_gain: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of the last T tokens of each row over latents shared by all heads (arXiv 2405.04434, app. C).

    Args:
        query: [B, T, H, r + ρ], the latent part first, the last ρ rotated.
        latent: [B, S, r], key and value of every head; with `pages` [P, page, r].
        rope_key: [B, S, ρ], rotated; with `pages` [P, page, ρ]. ρ may be 0.
        scale: multiplies the logits.
        lengths: int32 [B], tokens of each row, the T new ones included; None for all S.
        starts: int32 [B], the first token that is no padding; None for 0.
        pages: int32 [B, n], page table of each row.
        key_gain: [B, S, G], with `pages` [P, page, G]: factor on the logits of the H / G heads of each group.

    Returns:
        out [B, T, H, r] in the query's dtype: the attention-weighted latent; lse [B, T, H] fp32 (float64 for float64
        inputs): the logarithm of the sum of exponentials of the logits. Without a visible token they are 0 and -∞.

    Raises:
        ValueError: inconsistent shapes or dtypes.
    """
    return _mla_decode(query, latent, rope_key, scale, lengths, starts, pages, key_gain)


def _check(call: SimpleNamespace) -> None:
    query, latent, rope_key = call.query, call.latent, call.rope_key
    shapes = f"query {list(query.shape)}, latent {list(latent.shape)}, rope_key {list(rope_key.shape)}"
    if query.dim() != 4 or latent.dim() != 3 or rope_key.dim() != 3:
        raise ValueError(f"mla_decode: {shapes}: must be [B, T, H, r + ρ], [B, S, r] and [B, S, ρ]")
    width = latent.shape[-1] + rope_key.shape[-1]
    if query.shape[-1] != width or latent.shape[-1] == 0:
        raise ValueError(f"mla_decode: {shapes}: the query size must be r + ρ = {width}, with r at least 1")
    if latent.shape[:2] != rope_key.shape[:2]:
        raise ValueError(f"mla_decode: {shapes}: latent and rope_key must hold the same tokens")
    if call.pages is None and latent.shape[0] != query.shape[0]:
        raise ValueError(f"mla_decode: batch size is {query.shape[0]} for queries, {latent.shape[0]} for latents")
    if not query.dtype == latent.dtype == rope_key.dtype:
        dtypes = f"query is {query.dtype}, latent is {latent.dtype}, rope_key is {rope_key.dtype}"
        raise ValueError(f"mla_decode: {dtypes}: must have the same dtype")
    check_pages("mla_decode", query.shape[0], call.pages)
    check_gain(query, call.key_gain, latent.shape[:2])
    check_counts("mla_decode", query.shape[0], lengths=call.lengths, starts=call.starts)


def check_gain(query: Tensor, key_gain: Tensor | None, tokens: tuple[int, ...]) -> None:
    """Check that gains match the tokens and that the number of query heads is a multiple of the number of gains."""
    if key_gain is None:
        return
    if key_gain.dim() != 3 or key_gain.shape[:2] != tokens:
        raise ValueError(f"mla_decode: key_gain must be {list(tokens)} + [G], not {list(key_gain.shape)}")
    if key_gain.shape[-1] == 0 or query.shape[2] % key_gain.shape[-1]:
        raise ValueError(f"mla_decode: {query.shape[2]} query heads must be a multiple of {key_gain.shape[-1]} gains")


def unsupported(call: SimpleNamespace) -> str | None:
    """Return the reason why the kernel does not support these valid tensors, or None."""
    for tensor in vars(call).values():
        if isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return "the last dimension of a tensor is not contiguous"
    return None


_mla_decode = Operation(
    "mla_decode",
    ragged_latent_attention,
    lambda call: attention_outputs(call.query, call.latent.shape[-1]),
    unsupported,
    _check,
    growth=({"latent": 1, "rope_key": 1, "key_gain": 1},),
)
