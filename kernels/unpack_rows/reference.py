"""PyTorch reference of `unpack_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.kernels.mla_decode.packed_reference import values_of
from surgery.kernels.mla_decode.row_slots import channels_of
from surgery.kernels.reference import paged_tokens


def unpack_to_pages(
    rows: Tensor,
    step: Tensor,
    mean: Tensor,
    latent: Tensor,
    rope_key: Tensor,
    fields: list[int],
    lengths: Tensor,
    pages: Tensor,
    within: Tensor | None = None,
    begins: Tensor | None = None,
    exact: Tensor | None = None,
) -> None:
    """Compute `unpack_rows`; arguments as in `operator.py`."""
    page, paged = rows.shape[1], paged_tokens(rows, pages)
    rank = channels_of(fields) - rope_key.shape[-1]
    values, _ = values_of(paged, step, mean, fields, rank, within, begins, exact)
    latents = values[..., :rank]
    if latent.shape[-1] > rank:
        latents, _ = values_of(paged, step, mean, fields, rank, None, None, exact)
    token = torch.arange(values.shape[1], device=rows.device)
    mask = token < lengths[:, None]
    at = pages.long().repeat_interleave(page, dim=1)[mask], (token % page).expand_as(mask)[mask]
    latent[at] = latents[mask].to(latent.dtype)
    rope_key[at] = values[..., rank:][mask].to(latent.dtype)
