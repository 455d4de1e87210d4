"""Partial RoPE: conversion of a layer to latent form with RoPE on selected components; truncation of the latent."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from surgery.families.anatomy import AttentionAnatomy
from surgery.transforms.key_basis import KeyBasis
from surgery.transforms.latent_layer import LatentLayer


def latent_form(
    anatomy: AttentionAnatomy, basis: KeyBasis, rotated: Tensor, constant: Tensor | None = None
) -> LatentLayer:
    """Build the latent form in which only the components ``rotated`` keep RoPE.

    The latent holds the components without RoPE (real parts, imaginary parts) and then all values, untruncated. The
    form is exact if every component is rotated.

    Args:
        anatomy: the source layer, float64 for an exact change of basis.
        basis: components of the keys.
        rotated: indices of the components that keep RoPE, [ρ/2]; their order is the order of the frequencies.
        constant: complex [P, H], replaces the rotation ``exp(iθ(n-m))`` of a component without RoPE for query head h.
            The best constant is the mean rotation over the lags that attention uses. None: 1.
    """
    heads, groups, dim, width = anatomy.heads, anatomy.kv_heads, anatomy.head_dim, anatomy.value_dim
    device, dtype = anatomy.k.device, anatomy.k.dtype
    still = torch.ones(basis.components, dtype=torch.bool)
    still[rotated] = False
    still = still.nonzero()[:, 0]

    key_weight, key_bias = anatomy.key_weight()
    still_rows = basis.key_rows(still).to(device, dtype)
    rotated_rows = basis.key_rows(rotated).to(device, dtype)
    flat_key = key_weight.flatten(0, 1)
    down = torch.cat([still_rows @ flat_key, anatomy.v.flatten(0, 1), rotated_rows @ flat_key])
    down_bias = None
    if key_bias is not None or anatomy.v_bias is not None:
        k_bias = torch.zeros(groups * dim, dtype=dtype, device=device) if key_bias is None else key_bias.flatten()
        v_bias = (
            torch.zeros(groups * width, dtype=dtype, device=device)
            if anatomy.v_bias is None
            else anatomy.v_bias.flatten()
        )
        down_bias = torch.cat([still_rows @ k_bias, v_bias, rotated_rows @ k_bias])

    still_columns = basis.query_columns(still, heads).to(device, dtype)
    if constant is not None:
        still_columns = _multiply_columns(still_columns, constant[still].conj().T.to(device))
    value_columns = torch.zeros(heads, dim, groups * width, dtype=dtype, device=device)
    query_up = torch.cat([still_columns, value_columns, basis.query_columns(rotated, heads).to(device, dtype)], dim=-1)

    value_up = torch.zeros(heads, width, 2 * len(still) + groups * width, dtype=dtype, device=device)
    for head in range(heads):
        first = 2 * len(still) + (head // (heads // groups)) * width
        value_up[head, :, first : first + width] = torch.eye(width, dtype=dtype, device=device)
    return LatentLayer(
        source=anatomy,
        down=down,
        down_bias=down_bias,
        query_up=query_up,
        value_up=value_up,
        inv_freq=anatomy.inv_freq[basis.frequency[rotated]],
        o=anatomy.o,
    )


def latent_rows(anatomy: AttentionAnatomy, basis: KeyBasis, rotated: Tensor, *, dual: bool = False) -> Tensor:
    """Return rows [n, G (d + e)] that compute the untruncated latent of :func:`latent_form` from keys and values.

    With ``dual``, the rows map gradients at keys and values to gradients at the latent.
    """
    still = torch.ones(basis.components, dtype=torch.bool)
    still[rotated] = False
    rows = (basis.dual_rows if dual else basis.key_rows)(still.nonzero()[:, 0])
    values = torch.eye(anatomy.kv_heads * anatomy.value_dim, dtype=rows.dtype)
    return torch.block_diag(rows, values)


def truncate(layer: LatentLayer, down: Tensor, up: Tensor) -> LatentLayer:
    """Replace the latent z [n] by ``down z`` [r], read back as ``up (down z)``."""
    rank = layer.rank
    down, up = down.to(layer.down), up.to(layer.down)
    bias = layer.down_bias
    return replace(
        layer,
        down=torch.cat([down @ layer.down[:rank], layer.down[rank:]]),
        down_bias=None if bias is None else torch.cat([down @ bias[:rank], bias[rank:]]),
        query_up=torch.cat([layer.query_up[..., :rank] @ up, layer.query_up[..., rank:]], dim=-1),
        value_up=layer.value_up @ up,
    )


def choose_components(costs: list[Tensor], basis_frequency: Tensor, pairs: int, count: int) -> Tensor:
    """Count the components that keep RoPE at each frequency, equal in all layers so that a stock config can hold them.

    Costs are normalized per layer, sorted within each frequency and summed over layers; the ``count`` largest sums keep
    RoPE.

    Args:
        costs: per layer [P], the cost of removing RoPE from a component.
        basis_frequency: [P] frequency index of each component.
        pairs: number of frequencies d/2.
        count: number of components that keep RoPE, ρ/2.

    Returns:
        Counts by frequency, integers [pairs].
    """
    groups = len(basis_frequency) // pairs
    total = torch.zeros(groups, pairs, dtype=torch.float64)
    for cost in costs:
        share = cost.double() / cost.double().sum().clamp_min(torch.finfo(torch.float64).tiny)
        table = torch.zeros(groups, pairs, dtype=torch.float64)
        for frequency in range(pairs):
            table[:, frequency] = share[basis_frequency == frequency].sort(descending=True).values
        total += table
    selection = torch.zeros(groups * pairs, dtype=torch.long)
    selection[total.flatten().argsort(descending=True, stable=True)[:count]] = 1
    return selection.view(groups, pairs).sum(0)


def best_components(cost: Tensor, basis_frequency: Tensor, counts: Tensor) -> Tensor:
    """Return the ``counts[l]`` most costly components of each frequency l, ordered by frequency, then by cost."""
    picked = []
    for frequency, count in enumerate(counts.tolist()):
        candidates = (basis_frequency == frequency).nonzero()[:, 0]
        picked.append(candidates[cost[candidates].argsort(descending=True, stable=True)[:count]])
    return torch.cat(picked)


def _multiply_columns(columns: Tensor, factor: Tensor) -> Tensor:
    """Multiply the complex components that real columns [H, d, 2 n] compute by ``factor`` [H, n]."""
    real, imag = columns.chunk(2, dim=-1)
    a, b = factor.real[:, None].to(columns), factor.imag[:, None].to(columns)
    return torch.cat([real * a - imag * b, real * b + imag * a], dim=-1)
