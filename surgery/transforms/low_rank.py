"""Keys and values rebuilt from low-rank latents: one layer's closed forms, alone or on the latents of earlier layers.

``z = [k ; v]`` are the numbers that an attention layer computes from its input without their constant bias,
``z = W x``; the bias is added back after rebuilding at no cost. Keys are meant before a key norm: that is where they
are linear in the input, and the norm follows what is rebuilt. With mean m and bias b the second moment of z comes from
the one that calibration takes, ``E[z zᵀ] = C - b mᵀ - m bᵀ + b bᵀ``.

The method "fisher" keeps one latent for keys and values of all heads: the best rank r in the metric of the loss
gradients ``M = E[g gᵀ]``, in which an error δ costs ``δᵀ M δ / 2`` nats to second order. Other methods choose other
blocks, metrics and ways, see :mod:`surgery.transforms.low_rank_methods`.
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
from surgery.transforms.low_rank_methods import METHODS, BlockMoments, method_named

METRIC_DAMPING = 1e-6


@dataclass(frozen=True)
class LowRankConversion:
    """A layer in low-rank form and the errors that are expected of it.

    The errors are in the same metric for every method. With loss gradients in the statistics each is twice the loss
    increase in nats per token that is expected, to second order, and ``error`` holds the interplay of keys and values
    as well; without, they are shares of the energy of the bias-free keys and values, and ``error`` is their sum.

    Attributes:
        energies: of all possible latents of each block in the method's own metric, descending; what the layer does not
            keep of the method "fisher" sums to ``error``.
    """

    layer: LowRankLayer
    key_error: float
    value_error: float
    error: float
    energies: tuple[Tensor, ...]


@dataclass(frozen=True)
class SharedMoments:
    """Second moments of a layer's bias-free ``z`` with the latents that earlier layers have cached of the same token.

    Here keys carry the weight of a key norm, as in :class:`LayerStatistics`, and tokens the weights of its
    ``gradient_weighted_moment``.
    """

    cross: Tensor  # E[z c_sᵀ], [n, s]
    moment: Tensor  # E[c_s c_sᵀ], [s, s]
    stored: torch.dtype = torch.float64  # of the weights that make the latents

    @classmethod
    def of(
        cls,
        anatomy: AttentionAnatomy,
        inputs: Tensor,
        latents: Tensor,
        weight: Tensor | None = None,
        stored: torch.dtype = torch.float64,
    ) -> SharedMoments:
        """Measures them on the layer's inputs [N, T, D] and the shared latents [N, T, s] of the same tokens.

        ``weight`` [N T] is :attr:`LayerStatistics.token_weight`. Products of a sequence are taken in the anatomy's
        dtype and summed in float64, where :mod:`surgery.running.moment_precision` says.
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
    """The rows [n, D] that compute the bias-free ``z``, a key norm's weight included."""
    return torch.cat([anatomy.key_weight()[0].flatten(0, 1), anatomy.v.flatten(0, 1)])


def loss_metric(anatomy: AttentionAnatomy, statistics: LayerStatistics) -> Tensor:
    """Second moment [n, n] of the loss gradient at keys before their norm and values, damped; float64.

    The statistics must have gradients.
    """
    return _gradient(statistics, key_scale(anatomy))


def low_rank_layer(
    anatomy: AttentionAnatomy,
    statistics: LayerStatistics,
    blocks: tuple[Block, ...],
    method: str = "fisher",
    shared: SharedMoments | None = None,
) -> LowRankConversion:
    """Converts one layer to low-rank form.

    Args:
        anatomy: float64, on the CPU as the statistics are.
        statistics: of this layer.
        blocks: from :func:`surgery.transforms.low_rank_methods.blocks_for`, or of other ranks.
        method: one of ``METHODS``.
        shared: moments with the latents of earlier layers, which are read for nothing next to the layer's own.

    Raises:
        SurgeryError: an unknown method, statistics that lack what the method needs, or blocks that do not serve each
            key and value head once or have more latents than numbers to rebuild.
        ValueError: shared latents with anything but the method "fisher" and its one block.
    """
    rule = method_named(method)
    _check_blocks(anatomy, blocks)
    if shared is not None and (method != "fisher" or len(blocks) != 1):
        raise ValueError("latents of earlier layers can be read by method fisher with one block of latents only")
    _check_statistics(method, anatomy, statistics)
    scale = key_scale(anatomy)
    weighted = _bias_free(anatomy, statistics, weighted=True) / scale / scale[:, None]
    moment = weighted if rule.weighted else _bias_free(anatomy, statistics, weighted=False) / scale / scale[:, None]
    weight = kv_rows(anatomy) / scale[:, None]
    gradient = _gradient(statistics, scale)
    prediction = torch.zeros(len(moment), 0, dtype=moment.dtype)
    if shared is not None:
        cross = shared.cross / scale[:, None]
        prediction = regression(cross, shared.moment, shared.stored)
        predicted = prediction @ cross.mT
        moment = weighted = weighted - predicted - predicted.mT + prediction @ shared.moment @ prediction.mT
    whole = BlockMoments(
        moment=moment,
        metric=gradient,
        scaled=weight * statistics.input_scale @ weight.mT if rule.scaled else None,
        relevance=_relevance(anatomy, statistics, moment.diagonal() * _finite(scale).square()),
    )

    down, up, energies, start = [], moment.new_zeros(len(moment), sum(b.rank for b in blocks)), [], 0
    projection = moment.new_zeros(len(moment), len(moment))  # what is rebuilt of z: up down
    for block in blocks:
        index = elements_of(anatomy, block)
        factors = rule.factors(whole.of(index), block.rank)
        down.append(factors.down @ weight[index])
        up[index, start : start + block.rank] = factors.up
        projection[index[:, None], index] = factors.up @ factors.down
        energies.append(factors.energy)
        start += block.rank
    # Shared latents predict part of each own one, and the ups stand for what is left of it.
    up = torch.cat([prediction - projection @ prediction, up], dim=1)
    key_up, value_up = up.split([anatomy.kv_heads * anatomy.head_dim, anatomy.kv_heads * anatomy.value_dim])
    layer = LowRankLayer(
        source=anatomy,
        blocks=tuple(blocks),
        down=torch.cat(down),
        key_up=key_up.unflatten(0, (anatomy.kv_heads, anatomy.head_dim)),
        value_up=value_up.unflatten(0, (anatomy.kv_heads, anatomy.value_dim)),
    )
    return LowRankConversion(layer, *_errors(len(key_up), weighted, gradient, projection), tuple(energies))


def _check_blocks(anatomy: AttentionAnatomy, blocks: tuple[Block, ...]) -> None:
    heads = list(range(anatomy.kv_heads))
    for kind in ("keys", "values"):
        if sorted(head for block in blocks for head in getattr(block, kind)) != heads:
            raise SurgeryError(f"blocks of latents must serve the {kind} of each of {len(heads)} KV heads once")
    for block in blocks:
        numbers = len(elements_of(anatomy, block))
        if not 1 <= block.rank <= numbers:
            raise SurgeryError(f"a block of {block.rank} latents cannot stand for {numbers} numbers per token")


def _check_statistics(method: str, anatomy: AttentionAnatomy, statistics: LayerStatistics) -> None:
    low_rank_method, missing = METHODS[method], []
    if low_rank_method.weighted and statistics.gradient is None:
        missing.append("loss gradients")
    if low_rank_method.scaled and statistics.input_scale is None:
        missing.append("the scale of the attention's inputs")
    if low_rank_method.queries and statistics.query_energy is None:
        missing.append("the energy of the queries")
    if statistics.mean is None and (anatomy.k_bias is not None or anatomy.v_bias is not None):
        missing.append("the mean of keys and values, which have biases")
    if missing:
        raise SurgeryError(
            f"method {method} of --to lowrank: the statistics lack {' and '.join(missing)}", setting="method"
        )


def key_scale(anatomy: AttentionAnatomy) -> Tensor:
    """Return the divisors [n] of ``z`` that give keys before their norm; infinite where the norm's weight is zero."""
    scale = torch.ones(anatomy.kv_width, dtype=anatomy.k.dtype)
    if anatomy.k_norm is not None:
        weight = anatomy.k_norm.weight
        keys = torch.where(weight == 0, torch.inf, weight).expand(anatomy.kv_heads, -1).flatten()
        scale[: len(keys)] = keys
    return scale


def _finite(scale: Tensor) -> Tensor:
    return torch.where(scale.isinf(), 0, scale)


def _bias_free(anatomy: AttentionAnatomy, statistics: LayerStatistics, *, weighted: bool) -> Tensor:
    """``E[z zᵀ]`` of ``z`` less its bias, [n, n], a key norm's weight in the keys; gradient-weighted if asked."""
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


def _gradient(statistics: LayerStatistics, scale: Tensor) -> Tensor | None:
    """Metric of the loss at keys before their norm and values, damped."""
    if statistics.metric is None:
        return None
    gradient = statistics.raw_metric
    if gradient is None:
        scale = _finite(scale)
        gradient = statistics.metric * scale * scale[:, None]
    return damp(gradient, METRIC_DAMPING)


def regression(cross: Tensor, moment: Tensor, stored: torch.dtype = torch.float64) -> Tensor:
    """``E[z cᵀ] E[c cᵀ]^{-1}`` [n, s]; the latents have very different sizes, so they are scaled to one first.

    Nothing is predicted from a latent that does not vary, beyond rounding of the largest: a channel that the row has
    and the layer does not need. Weights that are ``stored`` in a dtype move a latent by about a quarter of its eps, of
    the largest. Inputs after a LayerNorm vary by that alone in one direction, as their mean is zero.
    """
    variance = moment.diagonal()
    rounding = max(torch.finfo(moment.dtype).eps * len(moment), (torch.finfo(stored).eps / 4) ** 2)
    size = torch.where(variance > rounding * variance.max(), variance, torch.inf).rsqrt()
    (inverse,) = psd_powers(moment * size * size[:, None], (-1.0,))
    return cross * size @ inverse * size


def _relevance(anatomy: AttentionAnatomy, statistics: LayerStatistics, energy: Tensor) -> Tensor | None:
    """ThinK's score of each number of ``z`` [n]: of a key channel, its energy times that of the queries it meets.

    RoPE turns the two channels of a pair into each other, so they share one score. Values have none: infinity.
    """
    if statistics.query_energy is None:
        return None
    keys = energy[: anatomy.kv_heads * anatomy.head_dim].view(anatomy.kv_heads, 2, -1).sum(1)  # [G, d/2]
    queries = statistics.query_energy.unflatten(0, (anatomy.kv_heads, -1)).sum(1)
    score = keys * queries.unflatten(-1, (2, -1)).sum(1)
    relevance = torch.full_like(energy, torch.inf)
    relevance[: 2 * score.numel()] = score.repeat(1, 2).flatten()
    return relevance


def elements_of(anatomy: AttentionAnatomy, block: Block) -> Tensor:
    """Return the positions in ``z`` of the elements that a block serves: keys, then values."""
    keys = torch.arange(anatomy.kv_heads * anatomy.head_dim).view(anatomy.kv_heads, -1)
    values = keys.numel() + torch.arange(anatomy.kv_heads * anatomy.value_dim).view(anatomy.kv_heads, -1)
    return torch.cat([keys[list(block.keys)].flatten(), values[list(block.values)].flatten()])


def _errors(keys: int, moment: Tensor, metric: Tensor | None, projection: Tensor) -> tuple[float, float, float]:
    """Expected error of keys, of values and of both, of ``z`` rebuilt as ``projection z``."""
    residual = torch.eye(len(moment), dtype=moment.dtype) - projection
    error = residual @ moment @ residual.mT
    if metric is None:
        tiny = torch.finfo(moment.dtype).tiny
        energy, lost_energy = moment.diagonal(), error.diagonal()
        shares = [float(lost_energy[part].sum() / energy[part].sum().clamp_min(tiny)) for part in _parts(keys)]
        return *shares, sum(shares)
    both = metric * error
    return *(float(both[part, part].sum()) for part in _parts(keys)), float(both.sum())


def _parts(keys: int) -> tuple[slice, slice]:
    return slice(keys), slice(keys, None)
