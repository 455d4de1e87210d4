"""Statistics of an MLA layer from its weights alone, for conversions without calibration text."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.calibration.statistics import LayerStatistics, pair_norm
from surgery.families.latent_anatomy import LatentAnatomy


def latent_weight_statistics(anatomy: LatentAnatomy, input_scale: Tensor) -> LayerStatistics:
    """Estimate statistics from weights, as :func:`surgery.calibration.library.weight_statistics` for other attention.

    Inputs are white noise times the weight of the norm before the attention; norms divide by their expected RMS. In
    place of moments of loss gradients it uses the queries' second moment for keys and ``W_oᵀ W_o`` for values, both
    mapped to the latent and scaled to equal trace.

    Args:
        anatomy: float64.
        input_scale: [D], the norm's weight.
    """
    scale, rank, unrotated = input_scale.to(anatomy.down), anatomy.rank, anatomy.unrotated_dim
    rows = anatomy.down * scale
    mean = torch.zeros(len(rows), dtype=rows.dtype) if anatomy.down_bias is None else anatomy.down_bias
    moment = rows @ rows.mT + torch.outer(mean, mean)
    factor = torch.ones_like(mean)
    factor[:rank] = (moment.diagonal()[:rank].mean() + anatomy.eps).rsqrt()
    order = torch.cat([torch.arange(rank, len(rows)), torch.arange(rank)])  # the rotary key first
    moment, mean = (moment * torch.outer(factor, factor))[order][:, order], (mean * factor)[order]

    query_moment = anatomy.q @ _query_input_moment(anatomy, scale) @ anatomy.q.mT  # [H, n + ρ, n + ρ]
    content, rotated = query_moment[:, :unrotated, :unrotated], query_moment[:, unrotated:, unrotated:]
    key_up, value_up = anatomy.up[:, :unrotated], anatomy.up[:, unrotated:]
    out = anatomy.o.permute(1, 0, 2)  # [H, D, e]
    grams = [(up.mT @ energy @ up).sum(0) for up, energy in ((key_up, content), (value_up, out.mT @ out))]
    tiny = torch.finfo(rows.dtype).tiny
    gradient = torch.block_diag(rotated.sum(0), sum(part / part.trace().clamp_min(tiny) for part in grams))

    query_energy = rotated.diagonal(dim1=-2, dim2=-1)
    return LayerStatistics(
        moment,
        gradient,
        pair_norm(query_energy),
        pair_norm(moment.diagonal()[None, : anatomy.head_dim]),
        tokens=0,
        mean=mean,
        query_energy=query_energy,
    )


def _query_input_moment(anatomy: LatentAnatomy, scale: Tensor) -> Tensor:
    """Return the second moment of the queries' inputs [D, D], or of the query latent after its norm [q, q]."""
    if anatomy.q_down is None:
        return torch.diag(scale.square())
    rows = anatomy.q_down * scale
    moment = rows @ rows.mT
    if anatomy.q_down_bias is not None:
        moment = moment + torch.outer(anatomy.q_down_bias, anatomy.q_down_bias)
    weight = anatomy.q_norm.weight
    return moment / (moment.diagonal().mean() + anatomy.q_norm.eps) * torch.outer(weight, weight)
