"""`mla_decode`: absorbed latent attention of the newest tokens over a cache of latents, as an operator of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.backend import refusal, tell_once
from surgery.kernels.mla_decode.reference import ragged_latent_attention
from surgery.kernels.reference_gradient import differentiate_by


def mla_decode(
    query: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    scale: float,
    *,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    pages: Tensor | None = None,
    window: int | None = None,
    key_gain: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the last T tokens of each row over its latents, which all heads share (arXiv 2405.04434, app. C).

    Args:
        query: [B, T, H, r + ρ], the latent part first, the last ρ rotated.
        latent: [B, S, r], key and value of every head; with `pages` [P, page, r].
        rope_key: [B, S, ρ], rotated; with `pages` [P, page, ρ]. ρ may be 0.
        scale: multiplies the logits.
        lengths: int32 [B], tokens of each row, the T new ones included; None for all S.
        starts: int32 [B], the first token that is no padding; None for 0.
        pages: int32 [B, n], the pages that hold a row's tokens, in their order.
        window: how many latest tokens a query sees, itself included; None for all.
        key_gain: [B, S, G], with `pages` [P, page, G]: factor on the logits of the H / G heads of each group.

    Returns:
        out [B, T, H, r] in the query's dtype: the attention-weighted latent; lse [B, T, H] fp32 (float64 for float64
        inputs): the logarithm of the sum of exponentials of the logits. A query that sees nothing has 0 and -∞.

    Raises:
        ValueError: shapes or dtypes that do not belong together.
    """
    check(query, latent, rope_key, lengths, starts, pages, window, key_gain)
    return _mla_decode(query, latent, rope_key, scale, lengths, starts, pages, key_gain, window)


def check(
    query: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
    pages: Tensor | None,
    window: int | None,
    key_gain: Tensor | None,
) -> None:
    """Refuses arguments of `mla_decode` that do not belong together."""
    if query.dim() != 4 or latent.dim() != 3 or rope_key.dim() != 3:
        raise ValueError(
            f"mla_decode: query {shape(query)}, latent {shape(latent)}, rope_key {shape(rope_key)}: "
            "[B, T, H, r + ρ], [B, S, r] and [B, S, ρ] are needed"
        )
    batch, width = query.shape[0], latent.shape[-1] + rope_key.shape[-1]
    if query.shape[-1] != width or latent.shape[-1] == 0:
        raise ValueError(f"mla_decode: queries of {query.shape[-1]} numbers, latent and rope_key of {width}")
    if latent.shape[:2] != rope_key.shape[:2]:
        raise ValueError(f"mla_decode: latent {shape(latent)} and rope_key {shape(rope_key)} hold other tokens")
    if pages is None and latent.shape[0] != batch:
        raise ValueError(f"mla_decode: {batch} rows of queries, {latent.shape[0]} of the latent")
    if not query.dtype == latent.dtype == rope_key.dtype:
        raise ValueError(
            f"mla_decode: query {query.dtype}, latent {latent.dtype}, rope_key {rope_key.dtype}: cast them"
        )
    check_rows("mla_decode", batch, window, lengths=lengths, starts=starts)
    if pages is not None and (pages.dim() != 2 or pages.shape[0] != batch or pages.dtype != torch.int32):
        raise ValueError(f"mla_decode: pages {shape(pages)} of {pages.dtype}: int32 [{batch}, n] is needed")
    if key_gain is not None:
        if key_gain.dim() != 3 or key_gain.shape[:2] != latent.shape[:2]:
            raise ValueError(f"mla_decode: key_gain {shape(key_gain)} beside latent {shape(latent)}")
        if key_gain.shape[-1] == 0 or query.shape[2] % key_gain.shape[-1]:
            raise ValueError(f"mla_decode: {query.shape[2]} heads are no multiple of {key_gain.shape[-1]} gains")


def check_rows(name: str, batch: int, window: int | None, **counts: Tensor | None) -> None:
    """Refuses counts of tokens that are no int32 [B], and a window below 1."""
    for what, each in counts.items():
        if each is not None and (each.shape != (batch,) or each.dtype != torch.int32):
            raise ValueError(f"{name}: {what} {shape(each)} of {each.dtype}: int32 [{batch}] is needed")
    if window is not None and window < 1:
        raise ValueError(f"{name}: a window of {window} tokens: at least 1 is needed")


def shape(tensor: Tensor) -> str:
    """A shape as messages say it."""
    return "[" + ", ".join(str(size) for size in tensor.shape) + "]"


@torch.library.custom_op(
    "surgery::mla_decode",
    mutates_args=(),
    schema="(Tensor query, Tensor latent, Tensor rope_key, float scale, Tensor? lengths, Tensor? starts, "
    "Tensor? pages, Tensor? key_gain, int? window) -> (Tensor, Tensor)",
)
def _mla_decode(query, latent, rope_key, scale, lengths, starts, pages, key_gain, window):
    inputs = (query, latent, rope_key, lengths, starts, pages, key_gain)
    reason = refusal(*inputs) or unsupported(inputs)
    if reason:
        tell_once("mla_decode", reason)
        return ragged_latent_attention(query, latent, rope_key, scale, lengths, starts, pages, key_gain, window)
    from surgery.kernels.mla_decode import kernel
    from surgery.kernels.split_kv import processors
    from surgery.kernels.tuned import key_of, tuned

    _, tokens, heads, _ = query.shape
    rank, rope = latent.shape[-1], rope_key.shape[-1]
    config = tuned(
        "mla_decode",
        key_of(heads=tokens * heads, rank=rank, rope=rope, dtype=query.dtype),
        query.device,
        kernel.default_config(tokens * heads, rank, rope, query.dtype, shared_limit(query.device)),
    )
    capacity = latent.shape[1] * (1 if pages is None else pages.shape[1])
    splits = kernel.splits_of(query, capacity, window, config, processors(query.device))
    out, lse, parts, logs = buffers(query, rank, splits)
    for launch in kernel.launches(
        query,
        latent,
        rope_key,
        scale,
        lengths,
        starts,
        pages,
        key_gain,
        window,
        out=out,
        lse=lse,
        parts=parts,
        logs=logs,
        splits=splits,
        config=config,
    ):
        launch.run()
    return out, lse


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on a device."""
    if device.type != "cuda":
        return 227 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def buffers(query: Tensor, rank: int, splits: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Outputs [B, T, H, r] and [B, T, H], and fp32 scratch for the parts of several splits."""
    batch, tokens, heads, _ = query.shape
    rows = batch * tokens * heads
    out = query.new_empty(batch, tokens, heads, rank)
    lse = query.new_empty(batch, tokens, heads, dtype=torch.float32)
    if splits == 1:
        return out, lse, None, None
    return (
        out,
        lse,
        query.new_empty(rows, splits, rank, dtype=torch.float32),
        query.new_empty(rows, splits, dtype=torch.float32),
    )


def unsupported(inputs: tuple[Tensor | None, ...]) -> str | None:
    """Why the kernel does not take these tensors, which are in order otherwise."""
    for tensor in inputs:
        if tensor is not None and tensor.dim() > 1 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return "the last dimension of a tensor is not contiguous"
    return None


@_mla_decode.register_fake
def _(query, latent, rope_key, scale, lengths, starts, pages, key_gain, window):
    out = query.new_empty(*query.shape[:3], latent.shape[-1])
    return out, query.new_empty(query.shape[:3], dtype=torch.promote_types(torch.float32, query.dtype))


differentiate_by(_mla_decode, ragged_latent_attention)
