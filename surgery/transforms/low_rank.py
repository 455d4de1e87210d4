"""Closed forms of low-rank keys and values of one layer.

``z = [k ; v]`` are keys and values without their bias, ``z = W x``; the bias is added after rebuilding. Keys are taken
before a key norm, where they are linear in the input; the norm is applied to the rebuilt keys. With mean m and bias b,
the second moment of z follows from the calibrated one: ``E[z zᵀ] = C - b mᵀ - m bᵀ + b bᵀ``.

The method "fisher" keeps one latent for keys and values of all heads: the best rank r in the metric of the loss
gradients ``M = E[g gᵀ]``, in which an error δ costs ``δᵀ M δ / 2`` nats to second order. Other methods differ in
blocks, metric and solver, see :mod:`surgery.transforms.low_rank_methods`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.calibration.statistics import LayerStatistics
from surgery.common.errors import SurgeryError
from surgery.families.anatomy import AttentionAnatomy
from surgery.transforms.algebra import damp
from surgery.transforms.low_rank_layer import Block, LowRankLayer
from surgery.transforms.low_rank_methods import METHODS, BlockMoments, check_factors


@dataclass(frozen=True)
class LowRankConversion:
    """Layer in low-rank form, and its predicted errors.

    The errors use the metric of the loss for every method. Each is twice the predicted loss increase in nats per token,
    to second order, and ``error`` includes the interaction of keys and values.

    Attributes:
        energies: per block, the energies of all possible latents in the method's metric, descending. For the method
            "fisher" the dropped energies sum to ``error``.
    """

    layer: LowRankLayer
    key_error: float
    value_error: float
    error: float
    energies: tuple[Tensor, ...]


def kv_rows(anatomy: AttentionAnatomy) -> Tensor:
    """Return the rows [n, D] that compute the bias-free ``z``, including the weight of a key norm."""
    return torch.cat([anatomy.key_weight()[0].flatten(0, 1), anatomy.v.flatten(0, 1)])


def loss_metric(anatomy: AttentionAnatomy, statistics: LayerStatistics) -> Tensor:
    """Compute the damped second moment [n, n] of the loss gradient at keys before their norm and values; float64."""
    gradient = statistics.raw_metric
    if gradient is None:
        scale = key_scale(anatomy)
        scale = torch.where(scale.isinf(), 0, scale)
        gradient = statistics.metric * scale * scale[:, None]
    return damp(gradient)


def low_rank_layer(
    anatomy: AttentionAnatomy,
    statistics: LayerStatistics,
    blocks: tuple[Block, ...],
    method: str = "fisher",
) -> LowRankConversion:
    """Convert one layer to low-rank form.

    Args:
        anatomy: the layer, float64 on the CPU like the statistics.
        statistics: statistics of this layer, with gradients.
        blocks: from :func:`surgery.transforms.low_rank_methods.blocks_for`, or with other ranks.
        method: a key of ``METHODS``.

    Raises:
        SurgeryError: blocks that do not serve each key and value head once or have more latents than elements to
            rebuild, or a method that returns something else than such factors.
    """
    rule = METHODS[method]
    _check_blocks(anatomy, blocks)
    scale = key_scale(anatomy)
    weighted = _bias_free(anatomy, statistics, weighted=True) / scale / scale[:, None]
    moment = weighted if rule.weighted else _bias_free(anatomy, statistics, weighted=False) / scale / scale[:, None]
    weight = kv_rows(anatomy) / scale[:, None]
    metric = loss_metric(anatomy, statistics)
    whole = BlockMoments(moment, metric)
    down, up, energies, start = [], moment.new_zeros(len(moment), sum(b.rank for b in blocks)), [], 0
    projection = moment.new_zeros(len(moment), len(moment))  # up down, so that ẑ = projection z
    for block in blocks:
        index = elements_of(anatomy, block)
        factors = rule.factors(whole.of(index), block.rank)
        check_factors(method, factors, block.rank, len(index))
        down.append(factors.down @ weight[index])
        up[index, start : start + block.rank] = factors.up
        projection[index[:, None], index] = factors.up @ factors.down
        energies.append(factors.energy)
        start += block.rank
    key_up, value_up = up.split([anatomy.kv_heads * anatomy.head_dim, anatomy.kv_heads * anatomy.value_dim])
    layer = LowRankLayer(
        source=anatomy,
        blocks=tuple(blocks),
        down=torch.cat(down),
        key_up=key_up.unflatten(0, (anatomy.kv_heads, anatomy.head_dim)),
        value_up=value_up.unflatten(0, (anatomy.kv_heads, anatomy.value_dim)),
    )
    return LowRankConversion(layer, *_errors(len(key_up), weighted, metric, projection), tuple(energies))


def _check_blocks(anatomy: AttentionAnatomy, blocks: tuple[Block, ...]) -> None:
    heads = list(range(anatomy.kv_heads))
    for kind in ("keys", "values"):
        if sorted(head for block in blocks for head in getattr(block, kind)) != heads:
            raise SurgeryError(f"blocks of latents must cover the {kind} of each of {len(heads)} KV heads exactly once")
    for block in blocks:
        numbers = len(elements_of(anatomy, block))
        if not 1 <= block.rank <= numbers:
            raise SurgeryError(f"a block must have 1 to {numbers} latents for its {numbers} elements, not {block.rank}")


def key_scale(anatomy: AttentionAnatomy) -> Tensor:
    """Return the divisors [n] that turn ``z`` into keys before their norm; infinite if the norm's weight is zero."""
    scale = torch.ones(anatomy.kv_width, dtype=anatomy.k.dtype)
    if anatomy.k_norm is not None:
        weight = anatomy.k_norm.weight
        keys = torch.where(weight == 0, torch.inf, weight).expand(anatomy.kv_heads, -1).flatten()
        scale[: len(keys)] = keys
    return scale


def _bias_free(anatomy: AttentionAnatomy, statistics: LayerStatistics, *, weighted: bool) -> Tensor:
    """Compute ``E[z zᵀ]`` [n, n] of the bias-free ``z``, including the weight of a key norm."""
    key_bias, value_bias = anatomy.key_weight()[1], anatomy.v_bias
    moment = statistics.gradient_weighted_moment if weighted else statistics.moment
    if key_bias is None and value_bias is None:
        return moment
    keys, mean = anatomy.kv_heads * anatomy.head_dim, statistics.gradient_weighted_mean if weighted else statistics.mean
    bias = torch.zeros_like(mean)
    if key_bias is not None:
        bias[:keys] = key_bias.flatten()
    if value_bias is not None:
        bias[keys:] = value_bias.flatten()
    both = torch.outer(bias, mean)
    return moment - both - both.mT + torch.outer(bias, bias)


def elements_of(anatomy: AttentionAnatomy, block: Block) -> Tensor:
    """Return the indices in ``z`` of the elements that a block serves: keys, then values."""
    keys = torch.arange(anatomy.kv_heads * anatomy.head_dim).view(anatomy.kv_heads, -1)
    values = keys.numel() + torch.arange(anatomy.kv_heads * anatomy.value_dim).view(anatomy.kv_heads, -1)
    return torch.cat([keys[list(block.keys)].flatten(), values[list(block.values)].flatten()])


def _errors(keys: int, moment: Tensor, metric: Tensor, projection: Tensor) -> tuple[float, float, float]:
    """Compute the expected errors of keys, values and both when ``z`` is rebuilt as ``projection z``."""
    residual = torch.eye(len(moment), dtype=moment.dtype) - projection
    both = metric * (residual @ moment @ residual.mT)
    return float(both[:keys, :keys].sum()), float(both[keys:, keys:].sum()), float(both.sum())
