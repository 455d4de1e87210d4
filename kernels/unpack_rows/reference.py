"""PyTorch reference of `unpack_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.mla_decode.packed_reference import values_of
from surgery.kernels.mla_decode.row_slots import channels_of
from surgery.kernels.reference import paged_tokens


def unpack_to_memory(
    rows: Tensor,
    step: Tensor,
    mean: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    fields: list[int],
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    pages: Tensor | None = None,
    within: Tensor | None = None,
    begins: Tensor | None = None,
    exact: Tensor | None = None,
    exact_starts: Tensor | None = None,
) -> None:
    """Compute `unpack_rows`; arguments as in `operator.py`."""
    page, text = rows.shape[1], rows if pages is None else paged_tokens(rows, pages)
    rank, first = channels_of(fields) - rope_key.shape[-1], (exact, exact_starts)
    values, _ = values_of(text, step, mean, fields, rank, within, begins, *first)
    latents = values[..., :rank]
    if latent.shape[-1] > rank:
        latents, _ = values_of(text, step, mean, fields, rank, None, None, *first)
    token, batch = torch.arange(values.shape[1], device=rows.device), torch.arange(len(text), device=rows.device)
    mask = (token >= 0 if starts is None else token >= starts[:, None]).expand(len(text), -1)
    if lengths is not None:
        mask = mask & (token < lengths[:, None])
    at = batch[:, None].expand_as(mask)[mask], token.expand_as(mask)[mask]
    if pages is not None:
        at = pages.long().repeat_interleave(page, dim=1)[mask], (token % page).expand_as(mask)[mask]
    latent[at] = latents[mask].to(latent.dtype)
    rope_key[at] = values[..., rank:][mask].to(latent.dtype)
