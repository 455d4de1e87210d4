"""Statistics of all layers on disk, written by the calibration sweep and read by transforms."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import torch
from torch import Tensor

from surgery.calibration.statistics import LagStatistics, LayerStatistics, pair_norm
from surgery.common.layer_files import LayerFiles
from surgery.families.anatomy import AttentionAnatomy


class StatisticsLibrary(LayerFiles):
    """Library with a file per layer and number of excluded first tokens.

    The last file read stays in memory, because a layer is loaded several times in a row.
    """

    def __init__(self, parent: Path | None = None):
        super().__init__("statistics", parent)
        self._last: tuple[Path, tuple[LayerStatistics, LagStatistics | None]] | None = None

    def save(self, layer: int, statistics: LayerStatistics, lags: LagStatistics | None, first: int = 0) -> None:
        """Save the statistics of a layer without the ``first`` tokens of each sequence."""
        self._last = None
        stored = {"statistics": asdict(statistics), "lags": asdict(lags) if lags else None}
        torch.save(stored, self._path(layer, self.suffix(first)))

    @staticmethod
    def suffix(first: int) -> str:
        """Return the file suffix of statistics without the ``first`` tokens."""
        return f"-{first}.pt" if first else ".pt"

    def load(self, layer: int, first: int = 0) -> tuple[LayerStatistics, LagStatistics | None]:
        """Load the statistics of a layer without the ``first`` tokens of each sequence."""
        path = self._path(layer, self.suffix(first))
        if self._last is None or self._last[0] != path:
            self._last = None  # free it before the next one is loaded
            stored = torch.load(path, weights_only=True)
            lags = LagStatistics(**stored["lags"]) if stored["lags"] else None
            # Earlier versions saved more moments, of queries and outputs.
            names = {each.name for each in fields(LayerStatistics)}
            moments = {name: value for name, value in stored["statistics"].items() if name in names}
            self._last = path, (LayerStatistics(**moments), lags)
        return self._last[1]


def weight_statistics(anatomy: AttentionAnatomy, input_scale: Tensor) -> LayerStatistics:
    """Estimate statistics from the weights alone, for conversions without calibration text.

    Inputs are white noise times the weight of the norm before the attention. In place of moments of loss gradients it
    uses the queries' second moment for keys and ``W_oᵀ W_o`` for values, scaled to equal trace, since their relative
    scale is unknown without text.

    Args:
        anatomy: float64.
        input_scale: [D], the norm's weight.
    """
    groups, repeat = anatomy.kv_heads, anatomy.heads // anatomy.kv_heads
    scale = input_scale.to(anatomy.k)
    key_weight, key_bias = anatomy.key_weight()
    rows = torch.cat([key_weight.flatten(0, 1), anatomy.v.flatten(0, 1)]) * scale
    moment = rows @ rows.mT
    bias = torch.zeros(len(rows), dtype=rows.dtype)
    if key_bias is not None:
        bias[: key_bias.numel()] = key_bias.flatten()
    if anatomy.v_bias is not None:
        bias[len(rows) - anatomy.v_bias.numel() :] = anatomy.v_bias.flatten()
    moment = moment + torch.outer(bias, bias)

    query = anatomy.q * scale  # [H, d, D]
    if anatomy.q_norm is not None:
        energy = query.square().sum((1, 2), keepdim=True)
        rms = (energy.mean() if anatomy.q_norm.joint else energy).div(anatomy.head_dim).sqrt()
        query = query / rms * anatomy.q_norm.weight[..., None]
    query_moment = query @ query.mT  # [H, d, d]
    if anatomy.q_bias is not None and anatomy.q_norm is None:
        query_moment = query_moment + anatomy.q_bias[:, :, None] * anatomy.q_bias[:, None]
    keys = _normalized(query_moment.unflatten(0, (groups, repeat)).sum(1))
    out = anatomy.o.permute(1, 0, 2)  # [H, D, e]
    values = _normalized((out.mT @ out).unflatten(0, (groups, repeat)).sum(1))
    gradient = torch.block_diag(*keys, *values)

    key_energy = moment.diagonal()[: groups * anatomy.head_dim].view(groups, -1)
    return LayerStatistics(
        moment,
        gradient,
        pair_norm(query_moment.diagonal(dim1=-2, dim2=-1)),
        pair_norm(key_energy),
        tokens=0,
        mean=bias,
        input_energy=scale.square(),
    )


def prior_lags(anatomy: AttentionAnatomy, basis, statistics: LayerStatistics, context: int) -> LagStatistics:
    """Estimate lag statistics without text: attention decays as 1 / (1 + lag), independently of queries and keys."""
    lag = torch.arange(min(context, anatomy.window or context), dtype=torch.float64)
    weight = 1 / (1 + lag)
    weight = weight / weight.sum()
    one = torch.ones(1, dtype=torch.float64)
    # One frequency at a time: a context of 131,072 lags at all components at once takes gigabytes.
    of_frequencies = [(torch.polar(one, -frequency * lag) * weight).sum() for frequency in anatomy.inv_freq]
    turned = torch.stack(of_frequencies)[basis.frequency]  # [P]
    group = torch.arange(anatomy.heads) // (anatomy.heads // anatomy.kv_heads)
    key_moment = statistics.keys(statistics.moment, anatomy).flatten(2).flatten(0, 1)
    rows = basis.key_rows(torch.arange(basis.components))
    energy = (rows @ key_moment * rows).sum(-1).view(2, -1).sum(0)  # E|k'_p|²
    energy = energy.clamp_min(0)  # components that duplicated heads leave empty round to either side of zero
    query_energy = statistics.query_norm.square().T[basis.frequency]  # E|q_l|² [P, H]
    query = basis.query.abs().square().sum(-1)[:, group] * query_energy
    return LagStatistics(turned[:, None] * (energy[:, None] * query), energy[:, None] * query)


def _normalized(blocks: Tensor) -> list[Tensor]:
    trace = blocks.diagonal(dim1=-2, dim2=-1).sum()
    return list(blocks / trace.clamp_min(torch.finfo(blocks.dtype).tiny))
