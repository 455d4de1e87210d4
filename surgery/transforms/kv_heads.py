"""Fewer KV heads: groups of KV heads become one each, and the result is a plain checkpoint of the source's family.

RoPE multiplies the pair of frequency ``l`` of every head by one phase, so heads may be mixed by a complex number per
head and frequency. A group of heads g keeps one shared key ``b_l = Σ_g down_{g,l} k_{g,l}``, and head g reads it as
``up_{g,l} b_l``: as ``Re(conj(q) up b) = Re(conj(conj(up) q) b)``, the factor goes into the query pair, before or after
rotation alike. Values are mixed by real matrices, ``v' = down v`` read as ``up_g v'``, and ``up_g`` goes into W_o.

A method is a choice of ``down`` and ``up``:

============ ============================ ============================= =========
method       keys, per frequency          values                        groups
============ ============================ ============================= =========
fisher       rank 1 in the metric of the  rank e in the metric of the   cheapest
             loss gradients               loss gradients
kv-heads     rank 1, plain error          rank e, plain error           adjacent
procrustes   mean of heads turned to      mean of heads turned to       cheapest
             agree (phases)               agree (orthogonal matrices)
mean-pool    mean                         mean                          adjacent
============ ============================ ============================= =========

Sources: mean-pool, GQA (arXiv 2305.13245); procrustes, arXiv 2412.20677, its rotations of keys restricted to those that
commute with RoPE; kv-heads, arXiv 2406.07056. Key-driven query allocation (arXiv 2408.08454) is not here: it gives KV
heads different numbers of query heads, which no stock class can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surgery.anatomy import AttentionAnatomy
from surgery.calibration.statistics import LayerStatistics
from surgery.errors import SurgeryError
from surgery.rope import to_complex, to_real
from surgery.transforms.algebra import damp, eigh_descending, psd_powers, reduced_rank_projection
from surgery.transforms.head_grouping import Group, adjacent_groups, cheapest_groups
from surgery.transforms.key_basis import frequency_blocks

METRIC_DAMPING = 1e-6
PROCRUSTES_ROUNDS = 30


@dataclass(frozen=True)
class GroupMoments:
    """Second moments and metrics of the n heads of a group (or of all), float64 and complex128."""

    key: Tensor  # [d/2, n, n] complex, E[z z^H] of the key pairs
    key_metric: Tensor  # [d/2, n, n] complex: the error of keys is Σ_l δ_l^H M_l δ_l
    value: Tensor  # [n, e, n, e]
    value_metric: Tensor  # [n, e, n, e]

    def of(self, group: Group) -> GroupMoments:
        """Those of some heads."""
        index = torch.tensor(group)
        rows, columns = index[:, None], index
        return GroupMoments(
            self.key[:, rows, columns],
            self.key_metric[:, rows, columns],
            self.value[index][:, :, index],
            self.value_metric[index][:, :, index],
        )

    def flat_values(self) -> tuple[Tensor, Tensor]:
        """Moment and metric of the values side by side, [n e, n e] each."""
        size = self.value.shape[0] * self.value.shape[1]
        return self.value.reshape(size, size), self.value_metric.reshape(size, size)

    def errors(self, maps: GroupMaps) -> tuple[float, float]:
        """Expected error of keys and of values in the metrics when each head reads what the maps leave of it."""
        key_map = maps.key_up[..., None] * maps.key_down[:, None]
        value, metric = self.flat_values()
        return (
            _error(self.key, self.key_metric, key_map),
            _error(value, metric, maps.value_up.flatten(0, 1) @ maps.value_down.flatten(1)),
        )


@dataclass(frozen=True)
class GroupMaps:
    """How the n heads of a group become one and are read back."""

    key_down: Tensor  # [d/2, n] complex
    key_up: Tensor  # [d/2, n] complex
    value_down: Tensor  # [e, n, e]
    value_up: Tensor  # [n, e, e]


@dataclass(frozen=True)
class Method:
    """The choices of one named method.

    Attributes:
        maps: from the moments of a group to its maps.
        weighted: it works in the metric of the loss; otherwise in that of plain errors.
        searches: it looks for the cheapest groups; otherwise it takes neighbours.
    """

    name: str
    maps: Callable[[GroupMoments], GroupMaps]
    weighted: bool = False
    searches: bool = False


@dataclass(frozen=True)
class MergedLayer:
    """A layer with fewer KV heads and the errors that are expected of it.

    The errors are in the same metric for every method. With loss gradients in the statistics each is twice the loss
    increase in nats per token that merging is expected to cost, to second order; without, a share of what the keys
    add to the scores, and of what the values add to the output.

    Attributes:
        anatomy: same shapes but for the number of KV heads; query heads stand in the order of ``groups``.
        groups: the source's KV heads that each KV head stands for.
    """

    anatomy: AttentionAnatomy
    groups: tuple[Group, ...]
    key_error: float
    value_error: float


def merge_kv_heads(
    anatomy: AttentionAnatomy, statistics: LayerStatistics, kv_heads: int, method: str = "fisher"
) -> MergedLayer:
    """Merges the KV heads of a layer in groups of one size.

    Args:
        anatomy: float64, on the CPU as the statistics are.
        statistics: of this layer. Without gradients the method "fisher" weights keys by the energies of their queries
            and values by ``W_oᵀ W_o`` (each output channel alike).
        kv_heads: to keep; must divide the source's number.
        method: one of ``METHODS``.

    Raises:
        SurgeryError: an unknown method, a number of heads that does not divide the source's, or a layer that
            normalises its keys or queries: the factors of a merge stand behind the norm, where no weight is.
    """
    if method not in METHODS:
        raise SurgeryError(f"method {method!r} of merging KV heads is unknown: choose {', '.join(METHODS)}")
    if not 0 < kv_heads < anatomy.kv_heads or anatomy.kv_heads % kv_heads:
        raise SurgeryError(
            f"{kv_heads} KV heads cannot be made of {anatomy.kv_heads}: choose a smaller number that divides it"
        )
    if anatomy.q_norm is not None or anatomy.k_norm is not None:
        raise SurgeryError(
            "KV heads behind a q/k-norm cannot be merged: the factor of each head would have to pass the norm; "
            "convert --to mla instead"
        )
    chosen, size = METHODS[method], anatomy.kv_heads // kv_heads
    loss = _moments(anatomy, statistics, weighted=True)
    own = loss if chosen.weighted else _moments(anatomy, statistics, weighted=False)
    groups = adjacent_groups(anatomy.kv_heads, size)
    if chosen.searches:

        def cost(group: Group) -> float:
            moments = own.of(group)
            return sum(moments.errors(chosen.maps(moments)))

        groups = cheapest_groups(anatomy.kv_heads, size, cost)
    maps = [chosen.maps(own.of(group)) for group in groups]
    errors = [loss.of(group).errors(part) for group, part in zip(groups, maps, strict=True)]
    key_error, value_error = (sum(kind) for kind in zip(*errors, strict=True))
    return MergedLayer(_merged(anatomy, groups, maps), groups, key_error, value_error)


def reorder_kv_heads(anatomy: AttentionAnatomy, order: Group) -> AttentionAnatomy:
    """The same layer with its KV heads in another order, their query heads and columns of ``o`` along with them."""
    repeat = anatomy.heads // anatomy.kv_heads
    kv = torch.tensor(order, device=anatomy.k.device)
    query = (kv[:, None] * repeat + torch.arange(repeat, device=kv.device)).flatten()

    def pick(bias: Tensor | None, index: Tensor) -> Tensor | None:
        return None if bias is None else bias[index]

    return replace(
        anatomy,
        q=anatomy.q[query],
        k=anatomy.k[kv],
        v=anatomy.v[kv],
        o=anatomy.o[:, query],
        q_bias=pick(anatomy.q_bias, query),
        k_bias=pick(anatomy.k_bias, kv),
        v_bias=pick(anatomy.v_bias, kv),
    )


def low_rank_maps(moments: GroupMoments) -> GroupMaps:
    """The least error in the metric: rank 1 over the heads at each frequency for keys, rank e for values.

    With ``M^{1/2} C M^{1/2} = U Σ² U^H`` the best map of rank r is ``M^{-1/2} U_r U_r^H M^{1/2}``, and what it loses are
    the eigenvalues beyond r. Neither a bias nor a mean needs care: ``C`` is uncentred.

    The split into ``down`` and ``up`` is free. It is chosen so that the factors of a group are 1 on average (root mean
    square for keys, ``Σ up_gᵀ up_g = n`` for values): merged weights are as large as the source's, in any dtype.
    """
    heads, width = moments.value.shape[:2]
    root, inverse_root = psd_powers(damp(moments.key_metric, METRIC_DAMPING), (0.5, -0.5))
    _, vectors = eigh_descending(root @ moments.key @ root)
    first = vectors[..., :1]
    key_down, key_up = (first.mH @ root)[..., 0, :], (inverse_root @ first)[..., 0]
    scale = key_up.abs().square().mean(-1, keepdim=True).sqrt()
    # The phase is free too; with this one, heads that agree are not turned.
    scale = torch.polar(scale, key_up.sum(-1, keepdim=True).angle())
    value, metric = moments.flat_values()
    down, up, _ = reduced_rank_projection(value, damp(metric, METRIC_DAMPING), width)
    root, inverse_root = psd_powers(up.mT @ up / heads, (0.5, -0.5))
    return GroupMaps(
        key_down=key_down * scale,
        key_up=key_up / scale,
        value_down=(root @ down).unflatten(1, (heads, width)),
        value_up=(up @ inverse_root).unflatten(0, (heads, width)),
    )


def mean_maps(moments: GroupMoments) -> GroupMaps:
    """Every head reads the mean of all."""
    heads, width = moments.value.shape[:2]
    ones = torch.ones(moments.key.shape[:2], dtype=moments.key.dtype)
    eye = torch.eye(width, dtype=moments.value.dtype).expand(heads, -1, -1)
    return GroupMaps(ones / heads, ones, eye.transpose(0, 1) / heads, eye)


def procrustes_maps(moments: GroupMoments) -> GroupMaps:
    """Every head reads the mean of all after turning it to itself.

    Generalised Procrustes: the turn of each head towards the mean and the mean of the turned heads, in turns. A head's
    keys are turned by a phase per frequency, its values by an orthogonal matrix (reflections included).
    """
    heads, width = moments.value.shape[:2]
    _, vectors = eigh_descending(moments.key)
    turn = torch.sgn(vectors[..., :1])
    matrix = moments.value.permute(0, 2, 1, 3)  # [n, n, e, e]
    value_turn = _polar(matrix[:, 0])
    for _ in range(PROCRUSTES_ROUNDS):
        turn = torch.sgn(moments.key @ turn)
        value_turn = _polar((matrix @ value_turn).sum(1))
    turn = turn[..., 0]
    return GroupMaps(turn.conj() / heads, turn, value_turn.permute(2, 0, 1) / heads, value_turn)


METHODS = {
    method.name: method
    for method in (
        Method("fisher", low_rank_maps, weighted=True, searches=True),
        Method("kv-heads", low_rank_maps),
        Method("procrustes", procrustes_maps, searches=True),
        Method("mean-pool", mean_maps),
    )
}


def _moments(anatomy: AttentionAnatomy, statistics: LayerStatistics, *, weighted: bool) -> GroupMoments:
    """Of all heads of a layer; weighted by the loss, or by the energies that meet keys and values, or not at all.

    Without gradients keys and values have no common unit: then both metrics are scaled so that errors are shares.
    """
    groups, width = anatomy.kv_heads, anatomy.value_dim
    keys = groups * anatomy.head_dim

    def values_of(matrix: Tensor) -> Tensor:
        return matrix[keys:, keys:].reshape(groups, width, groups, width)

    key = frequency_blocks(statistics.keys(statistics.moment, anatomy))
    value = values_of(statistics.moment)
    if weighted and statistics.gradient is not None:
        # Half: (g . δ)² of real pairs is |conj(g) δ|² / 2 on average over phases.
        key_metric = frequency_blocks(statistics.keys(statistics.gradient, anatomy)) / 2
        return GroupMoments(key, key_metric, value, values_of(statistics.gradient))
    key_metric = torch.eye(groups, dtype=key.dtype).expand_as(key)
    value_blocks = torch.eye(width, dtype=value.dtype).expand(groups, -1, -1)
    if weighted:
        energy = statistics.query_norm.square().unflatten(0, (groups, -1)).sum(1)  # [G, d/2]
        key_metric = torch.diag_embed(energy.T).to(key.dtype)
        out = anatomy.o.permute(1, 0, 2).to(value)
        value_blocks = (out.mT @ out).unflatten(0, (groups, -1)).sum(1)
    value_metric = torch.block_diag(*value_blocks).view_as(value)
    key_energy = _error(key, key_metric, torch.zeros_like(key))
    value_energy = torch.einsum("gehf,gehf->", value, value_metric)
    return GroupMoments(key, key_metric / key_energy, value, value_metric / value_energy)


def _error(moment: Tensor, metric: Tensor, projection: Tensor) -> float:
    """``E (z - P z)^H M (z - P z)`` summed over a batch of [n, n] matrices."""
    rest = torch.eye(moment.shape[-1], dtype=moment.dtype) - projection
    return float((metric * (rest @ moment @ rest.mH).mT).sum().real)


def _merged(anatomy: AttentionAnatomy, groups: tuple[Group, ...], maps: list[GroupMaps]) -> AttentionAnatomy:
    """Applies the maps of every group to the weights. A bias is one more input channel, which is always 1."""
    ordered = reorder_kv_heads(anatomy, sum(groups, ()))
    shape = (len(groups), len(groups[0]))
    key_down, key_up, value_down, value_up = (
        torch.stack([getattr(part, name) for part in maps])
        for name in ("key_down", "key_up", "value_down", "value_up")
    )
    query = to_complex(_affine(ordered.q, ordered.q_bias).mT).unflatten(0, (*shape, -1))  # [G', n, R, D + 1, d/2]
    query = query * key_up.conj().mT[:, :, None, None]
    key = to_complex(_affine(ordered.k, ordered.k_bias).mT).unflatten(0, shape)  # [G', n, D + 1, d/2]
    key = torch.einsum("Glg,Ggxl->Gxl", key_down, key)
    value = torch.einsum("Gegf,Ggfx->Gex", value_down, _affine(ordered.v, ordered.v_bias).unflatten(0, shape))
    out = torch.einsum("xGgre,Ggef->xGgrf", ordered.o.unflatten(1, (*shape, -1)), value_up)
    parts = {"q": to_real(query.flatten(0, 2)).mT, "k": to_real(key).mT, "v": value}
    biases = {name + "_bias": part[..., -1] for name, part in parts.items() if getattr(anatomy, name + "_bias") is not None}
    weights = {name: part[..., : anatomy.hidden].contiguous() for name, part in parts.items()}
    return replace(anatomy, **weights, **biases, o=out.flatten(1, 3))


def _affine(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Weight [h, d, D] and bias [h, d] as one [h, d, D + 1]; the weight alone if there is no bias."""
    return weight if bias is None else torch.cat([weight, bias[..., None]], dim=-1)


def _polar(matrix: Tensor) -> Tensor:
    """The orthogonal matrices nearest to ``matrix`` [..., e, e]."""
    left, _, right = torch.linalg.svd(matrix)
    return left @ right
