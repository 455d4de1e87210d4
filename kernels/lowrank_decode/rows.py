"""Arguments of decode attention over keys rebuilt from latents, and the call of the C++ kernel for packed rows.

Shapes: B rows, T new tokens, H query heads, G KV heads, d head size, V the largest value rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

IN_CPP = "lowrank_decode_packed"
"""Operation of the kernel for CPUs."""
COLUMNS = 16
"""Multiple of columns that the kernel reads of the up-projection."""

Span = tuple[int, int]
"""First latent and rank that a head reads."""


def stacked_heads(
    ups: Mapping[int, Tensor], spans: Sequence[Span], order: Sequence[int] | None, dim: int
) -> tuple[Tensor, list[Span]]:
    """Stack the up-projections [heads · d, rank] of blocks to [G, d, largest rank], padded by zeros.

    Args:
        ups: up-projection of each block with heads, by the index of the block.
        spans: latents of each block.
        order: index of each head among those of all blocks; None if they are in order.
        dim: d.

    Returns:
        The stacked up-projections, a view if there is one block, and the latents of each head.
    """
    widest = max(up.shape[1] for up in ups.values())
    rows, of_heads = [], []
    for number, up in ups.items():
        wide = nn.functional.pad(up.detach(), (0, widest - up.shape[1])) if up.shape[1] < widest else up.detach()
        rows.append(wide.unflatten(0, (-1, dim)))
        of_heads += [spans[number]] * len(rows[-1])
    stacked = rows[0] if len(rows) == 1 else torch.cat(rows)
    if order is None:
        return stacked, of_heads
    return torch.stack([stacked[index] for index in order]), [of_heads[index] for index in order]


def transposed_keys(key_up: Tensor) -> Tensor:
    """Transpose up-projections of keys [G, d, r] for the C++ kernel: fp32 [G, r, d padded to `COLUMNS`]."""
    up = key_up.detach().float().mT
    return nn.functional.pad(up, (0, -up.shape[2] % COLUMNS)).contiguous()


def decode_rows(
    query: Tensor,
    rows: Sequence[Tensor],
    steps: Sequence[Tensor],
    means: Sequence[Tensor],
    exact: Sequence[Tensor],
    fields: Sequence[Sequence[int]],
    keys: Tensor,
    ranges: Sequence[tuple[int, int, int, int]],
    scale: float,
    **others: Any,
) -> Tensor:
    """Compute weighted latents [B, T, H, V] fp32 of query [B, T, H, d] by the C++ kernel, over rows of several layers.

    Args:
        rows, steps, means, exact: as in `lowrank_decode_packed.cpp`.
        fields: bit fields of each layer's rows, flattened.
        keys: from :func:`transposed_keys`.
        ranges: first latent and rank of each KV head's key, and of its value.
        others: optional arguments of the kernel by name.
    """
    counts = [len(each) // 4 for each in fields]
    flat = list(chain.from_iterable(fields)), counts, keys, list(chain.from_iterable(ranges))
    return getattr(torch.ops.surgery_cpu, IN_CPP)(
        query, list(rows), list(steps), list(means), list(exact), *flat, scale, **others
    )


def lifted(out: Tensor, value_up: Tensor, bias: Tensor | None) -> Tensor:
    """Project weighted latents [B, T, H, V] by `value_up` [G, d, V] and add the bias [G, d]: [B, T, H, d]."""
    groups = out.unflatten(2, (len(value_up), -1))
    values = torch.einsum("btgqr,gdr->btgqd", groups, value_up)
    if bias is not None:
        values = values + bias[:, None]
    return values.flatten(2, 3)
