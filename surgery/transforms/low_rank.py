"""Closed forms of low-rank keys and values of one layer, alone or on top of the latents of earlier layers.

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
from surgery.running.moment_precision import MomentPrecision
from surgery.transforms.algebra import damp, psd_powers
from surgery.transforms.low_rank_layer import Block, LowRankLayer
from surgery.transforms.low_rank_methods import METHODS, BlockMoments


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


@dataclass(frozen=True)
class SharedMoments:
    """Second moments of a layer's bias-free ``z`` and the latents that earlier layers cached of the same token.

    Keys include the weight of a key norm, as in :class:`LayerStatistics`; tokens are weighted as in its
    ``gradient_weighted_moment``.
    """

    cross: Tensor  # E[z c_sᵀ], [n, s]
    moment: Tensor  # E[c_s c_sᵀ], [s, s]
    stored: torch.dtype = torch.float64  # dtype of the down-projections of the latents

    @classmethod
    def of(
        cls,
        anatomy: AttentionAnatomy,
        inputs: Tensor,
        latents: Tensor,
        weight: Tensor | None = None,
        stored: torch.dtype = torch.float64,
    ) -> SharedMoments:
        """Measure the moments on the layer's inputs [N, T, D] and the shared latents [N, T, s] of the same tokens.

        ``weight`` [N T] is :attr:`LayerStatistics.token_weight`. Products within a sequence use the anatomy's dtype;
        sums are in float64, on the device that :mod:`surgery.running.moment_precision` chooses.
        """
        weight = torch.ones(inputs.shape[:2].numel()) if weight is None else weight
        rows = kv_rows(anatomy)
        size = latents.shape[-1]
        precision = MomentPrecision.of(rows.device, 2 * 8 * size * (len(rows) + size))
        cross = torch.zeros(len(rows), size, dtype=torch.float64, device=precision.sums)
        moment = torch.zeros(size, size, dtype=torch.float64, device=precision.sums)
        for x, c, w in zip(inputs, latents, weight.view(inputs.shape[:2]), strict=True):
            c = c.to(rows)
            weighted = c * w.to(rows)[:, None]
            cross += precision.kept(rows @ (x.to(rows).mT @ weighted))
            moment += precision.kept(c.mT @ weighted)
        total = float(weight.double().sum())
        return cls(cross.cpu() / total, moment.cpu() / total, stored)


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
    shared: SharedMoments | None = None,
) -> LowRankConversion:
    """Convert one layer to low-rank form.

    Args:
        anatomy: the layer, float64 on the CPU like the statistics.
        statistics: statistics of this layer, with gradients.
        blocks: from :func:`surgery.transforms.low_rank_methods.blocks_for`, or with other ranks.
        method: a key of ``METHODS``.
        shared: moments with the latents of earlier layers, which cost no further cache next to the layer's own.

    Raises:
        SurgeryError: blocks that do not serve each key and value head once or have more latents than elements to
            rebuild.
        ValueError: shared latents with a method other than "fisher", or with more than one block.
    """
    rule = METHODS[method]
    _check_blocks(anatomy, blocks)
    if shared is not None and (method != "fisher" or len(blocks) != 1):
        raise ValueError("reading the latents of earlier layers requires method fisher with one block of latents")
    scale = key_scale(anatomy)
    weighted = _bias_free(anatomy, statistics, weighted=True) / scale / scale[:, None]
    moment = weighted if rule.weighted else _bias_free(anatomy, statistics, weighted=False) / scale / scale[:, None]
    weight = kv_rows(anatomy) / scale[:, None]
    metric = loss_metric(anatomy, statistics)
    prediction = torch.zeros(len(moment), 0, dtype=moment.dtype)
    if shared is not None:
        cross = shared.cross / scale[:, None]
        prediction = regression(cross, shared.moment, shared.stored)
        predicted = prediction @ cross.mT
        moment = weighted = weighted - predicted - predicted.mT + prediction @ shared.moment @ prediction.mT
    whole = BlockMoments(moment, metric)
    down, up, energies, start = [], moment.new_zeros(len(moment), sum(b.rank for b in blocks)), [], 0
    projection = moment.new_zeros(len(moment), len(moment))  # up down, so that ẑ = projection z
    for block in blocks:
        index = elements_of(anatomy, block)
        factors = rule.factors(whole.of(index), block.rank)
        down.append(factors.down @ weight[index])
        up[index, start : start + block.rank] = factors.up
        projection[index[:, None], index] = factors.up @ factors.down
        energies.append(factors.energy)
        start += block.rank
    # The own latents' up-projections rebuild only the part that the shared latents do not predict.
    up = torch.cat([prediction - projection @ prediction, up], dim=1)
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


def regression(cross: Tensor, moment: Tensor, stored: torch.dtype = torch.float64) -> Tensor:
    """Compute the regression ``E[z cᵀ] E[c cᵀ]^{-1}`` [n, s]; latents of very different sizes are scaled to one first.

    Latents that vary no more than rounding errors of the largest get no weight: they are channels that the row has and
    the layer does not need. Weights of the dtype ``stored`` shift a latent by about eps / 4 of the largest. Inputs
    after a LayerNorm have zero mean, so in one direction they vary by that alone.
    """
    variance = moment.diagonal()
    rounding = max(torch.finfo(moment.dtype).eps * len(moment), (torch.finfo(stored).eps / 4) ** 2)
    size = torch.where(variance > rounding * variance.max(), variance, torch.inf).rsqrt()
    (inverse,) = psd_powers(moment * size * size[:, None], (-1.0,))
    return cross * size @ inverse * size


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
