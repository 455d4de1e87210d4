"""MHA/GQA → MLA: conversion of one layer's anatomy and statistics to its latent form, by named methods.

The steps are the same for every method: a change of basis of the keys that commutes with RoPE, the choice of the
components that keep RoPE, and one joint latent for the other components and the values. A method is a choice of metric
for each step:

========== ============================ ============================= ==================================
method     basis of the keys            components that keep RoPE     latent of [keys ; values]
========== ============================ ============================= ==================================
fisher     complex, loss-weighted       least score error over the    loss-gradient (Fisher) metric
                                        lags of real attention, best
                                        constant for the rest
transmla   real rotation, FreqFold      first components              PCA, keys scaled to the values' norm
mha2mla    none                         largest ‖q‖·‖k‖               SVD of the weights
========== ============================ ============================= ==================================

Sources: TransMLA, arXiv 2502.07864; MHA2MLA, arXiv 2502.14837; the Fisher metric generalizes activation-weighted
low rank (SVD-LLM, arXiv 2403.07378) by the curvature of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.calibration.statistics import LagStatistics, LayerStatistics
from surgery.families.anatomy import AttentionAnatomy
from surgery.transforms import partial_rope
from surgery.transforms.algebra import damp, eigvalsh, left_root, reduced_rank_projection, relative
from surgery.transforms.key_basis import KeyBasis, energy_basis, folded_basis, identity_basis
from surgery.transforms.latent_layer import LatentLayer


@dataclass(frozen=True)
class Method:
    """Definition of a named method.

    It may need loss gradients, and lags to choose components and to replace dropped rotations by constants. If it
    ``folds``, it treats neighboring frequencies as one, and rotates the first components.
    """

    name: str
    gradients: bool = False
    lags: bool = False
    folds: bool = False


METHODS = {
    method.name: method
    for method in (Method("fisher", gradients=True, lags=True), Method("transmla", folds=True), Method("mha2mla"))
}


@dataclass(frozen=True)
class Split:
    """Split of a layer's KV budget, equal in all layers: ρ rotary dimensions and a latent of rank r."""

    rope_dim: int
    rank: int
    fold: int = 1


@dataclass(frozen=True)
class ConvertedLayer:
    """Layer after each step of the conversion: latent form with partial RoPE, then truncated.

    Attributes:
        rope_error: predicted error of the dropped rotations, relative to the squared scores; None without lags.
        sizes: root mean squares of the truncated latent and of the rotary keys, over channels and tokens.
        energy: energies of the latent's dimensions in the method's metric, descending. In a Fisher metric each is twice
            the predicted loss increase, in nats per token, of dropping the dimension.
    """

    basis: KeyBasis
    partial: LatentLayer
    truncated: LatentLayer
    sizes: tuple[float, float]
    rope_error: float | None
    energy: Tensor

    @property
    def latent_error(self) -> float:
        """Predicted squared error of the truncated latent."""
        return float(self.energy[self.truncated.rank :].sum())


def key_basis(method: Method, anatomy: AttentionAnatomy, statistics: LayerStatistics, split: Split | None) -> KeyBasis:
    """Compute the method's basis of a layer's keys; only methods that fold use ``split``."""
    if method.folds:
        return folded_basis(statistics.keys(statistics.moment, anatomy), split.fold, split.rope_dim // 2)
    if method.gradients:
        moment, gradient = statistics.gradient_weighted_moment, statistics.metric
        return energy_basis(statistics.keys(moment, anatomy), statistics.keys(gradient, anatomy))
    return identity_basis(anatomy.kv_heads, anatomy.head_dim // 2)


def lag_basis(method: Method) -> Callable[[AttentionAnatomy, LayerStatistics], KeyBasis] | None:
    """Return the function that computes the basis for lag statistics; None if the method needs none."""
    return (lambda anatomy, statistics: key_basis(method, anatomy, statistics, None)) if method.lags else None


def component_costs(
    method: Method, anatomy: AttentionAnatomy, statistics: LayerStatistics, lags: LagStatistics | None
) -> Tensor:
    """Compute the cost of removing RoPE from each component, [P]; comparable within a layer only."""
    if method.lags:
        return lags.cost()
    # MHA2MLA's 2-norm strategy (arXiv 2502.14837, section 3.1.1), summed over the query heads of a group.
    queries = statistics.query_norm.view(anatomy.kv_heads, -1, anatomy.head_dim // 2).sum(1)
    return (queries * statistics.key_norm).flatten()


def rotated_components(
    method: Method, basis: KeyBasis, costs: Tensor | None, counts: Tensor | None, split: Split
) -> Tensor:
    """Choose the ρ/2 components of one layer that keep RoPE; indices in the order of the model's frequency list."""
    if method.folds:
        first = torch.arange(split.rope_dim // 2)
        return first[basis.frequency[first].argsort(stable=True)]
    return partial_rope.best_components(costs, basis.frequency, counts)


def rotation_energies(
    anatomy: AttentionAnatomy, statistics: LayerStatistics, basis: KeyBasis, lags: LagStatistics
) -> Tensor:
    """Predict twice the loss increase in nats per token of removing RoPE from each component, [P].

    The energy of a component in the Fisher metric is the cost of dropping it altogether. Lag statistics give the share
    of that cost that depends on its rotation. Costs of rotations and energies of latents are then shares of one loss,
    and one budget can be spent on both.
    """
    turned = lags.cost() / lags.energy.sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
    return component_energies(anatomy, statistics, basis) * turned


def component_energies(anatomy: AttentionAnatomy, statistics: LayerStatistics, basis: KeyBasis) -> Tensor:
    """Predict twice the loss increase in nats per token of dropping each component, [P]."""
    every = torch.arange(basis.components)
    keys = anatomy.kv_heads * anatomy.head_dim
    moment, metric = (each[:keys, :keys] for each in (statistics.gradient_weighted_moment, statistics.metric))
    energy = _quadratic(basis.key_rows(every), moment) * _quadratic(basis.dual_rows(every), metric)
    return energy.view(2, -1).sum(0)


def latent_energies(
    anatomy: AttentionAnatomy, statistics: LayerStatistics, basis: KeyBasis, choices: Sequence[Tensor]
) -> list[Tensor]:
    """Compute :attr:`ConvertedLayer.energy` of method fisher for each choice of rotated components."""
    moment, metric = _latent_moments(anatomy, statistics, basis, torch.arange(0))
    energies = []
    for rotated in choices:
        still = torch.ones(len(moment), dtype=torch.bool)
        still[rotated] = still[basis.components + rotated] = False  # real and imaginary parts
        root = left_root(damp(metric[still][:, still]))
        energies.append(eigvalsh(root.mT @ moment[still][:, still] @ root).flip(0).clamp_min(0))
    return energies


def convert_layer(
    method: Method,
    anatomy: AttentionAnatomy,
    statistics: LayerStatistics,
    basis: KeyBasis,
    rotated: Tensor,
    rank: int,
    lags: LagStatistics | None = None,
) -> ConvertedLayer:
    """Convert one layer to MLA.

    Args:
        anatomy: the layer in float64.
        basis: from :func:`key_basis`.
        rotated: from :func:`rotated_components`.
        rank: r, the rank of the latent.
        lags: statistics over ``basis``, for methods that use them.
    """
    constant = lags.constant() if method.lags else None
    partial = partial_rope.latent_form(anatomy, basis, rotated, constant)
    if method.gradients:
        moment, metric = _latent_moments(anatomy, statistics, basis, rotated)
        metric = damp(metric)
    elif method.folds:
        rows = partial_rope.latent_rows(anatomy, basis, rotated)
        moment = rows @ statistics.moment @ rows.mT
        metric = _balance(moment, len(moment) - anatomy.kv_heads * anatomy.value_dim)
    else:
        weight = partial.down[: partial.rank].double().cpu()
        moment, metric = weight @ weight.mT, torch.eye(len(weight), dtype=torch.float64)
    down, up, energy = reduced_rank_projection(moment, metric, min(rank, len(moment)))
    sizes = _cached_sizes(anatomy, statistics, basis, rotated, down)
    rope_error = None
    if method.lags:
        cost, total = lags.cost(), lags.energy.sum()
        rope_error = relative(float(cost.sum() - cost[rotated].sum()), float(total))
    return ConvertedLayer(
        basis=basis,
        partial=partial,
        truncated=partial_rope.truncate(partial, down, up),
        sizes=sizes,
        rope_error=rope_error,
        energy=energy,
    )


def _latent_moments(
    anatomy: AttentionAnatomy, statistics: LayerStatistics, basis: KeyBasis, rotated: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the second moment of the untruncated latent and its Fisher metric."""
    rows, dual = (partial_rope.latent_rows(anatomy, basis, rotated, dual=dual) for dual in (False, True))
    moment, metric = rows @ statistics.gradient_weighted_moment @ rows.mT, dual @ statistics.metric @ dual.mT
    return moment, metric


def _cached_sizes(
    anatomy: AttentionAnatomy, statistics: LayerStatistics, basis: KeyBasis, rotated: Tensor, down: Tensor
) -> tuple[float, float]:
    """Compute :attr:`ConvertedLayer.sizes` of ``down`` times the untruncated latent; 1 in place of a size of 0."""
    keys = anatomy.kv_heads * anatomy.head_dim
    latent = _quadratic(down @ partial_rope.latent_rows(anatomy, basis, rotated), statistics.moment)
    rope_key = _quadratic(basis.key_rows(rotated), statistics.moment[:keys, :keys])
    latent_size, rope_size = (math.sqrt(max(float(each.sum()), 0.0) / max(len(each), 1)) for each in (latent, rope_key))
    return latent_size or 1.0, rope_size or 1.0


def _quadratic(rows: Tensor, matrix: Tensor) -> Tensor:
    """Compute ``x M xᵀ`` for every row x."""
    return ((rows @ matrix) * rows).sum(-1)


def _balance(moment: Tensor, keys: int) -> Tensor:
    """Build TransMLA's balanced KV metric (section 4.4), which scales keys to the mean column norm of the values."""
    norms = moment.diagonal().clamp_min(0).sqrt()
    metric = torch.ones_like(norms)
    if keys:
        metric[:keys] = (norms[keys:].mean() / norms[:keys].mean().clamp_min(1e-30)) ** 2
    return torch.diag(metric)
