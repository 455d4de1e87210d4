"""Grouping of KV heads: moments, maps that merge a group into one head, and the search for the cheapest groups.

The error of every map has a closed form in the second moments, ``tr M (1 - P) C (1 - P)^H``, where P is the map down
and back up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from math import comb, prod

import torch
from torch import Tensor

from surgery.calibration.statistics import LayerStatistics
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.rope import to_complex, to_real
from surgery.transforms.algebra import damp, eigh_descending, psd_powers, reduced_rank_projection
from surgery.transforms.key_basis import frequency_blocks

Group = tuple[int, ...]

# Eight heads have 105 partitions into pairs (28 groups) and 35 into fours (70 groups), few enough to try all.
EXACT_PARTITIONS = 105


@dataclass(frozen=True)
class GroupMoments:
    """Second moments and metrics of n heads, a group or all of a layer; float64 and complex128."""

    key: Tensor  # [d/2, n, n] complex, E[z z^H] of the key pairs
    key_metric: Tensor  # [d/2, n, n] complex: the error of keys is Σ_l δ_l^H M_l δ_l
    value: Tensor  # [n, e, n, e]
    value_metric: Tensor  # [n, e, n, e]

    def of(self, group: Group) -> GroupMoments:
        """Select the moments of a group of heads."""
        index = torch.tensor(group)
        rows, columns = index[:, None], index
        return GroupMoments(
            self.key[:, rows, columns],
            self.key_metric[:, rows, columns],
            self.value[index][:, :, index],
            self.value_metric[index][:, :, index],
        )

    def flat_values(self) -> tuple[Tensor, Tensor]:
        """Return moment and metric of the concatenated values, [n e, n e] each."""
        size = self.value.shape[0] * self.value.shape[1]
        return self.value.reshape(size, size), self.value_metric.reshape(size, size)

    def errors(self, maps: GroupMaps) -> tuple[float, float]:
        """Compute the expected errors of keys and values in the metrics after the maps merge the heads."""
        key_map = maps.key_up[..., None] * maps.key_down[:, None]
        value, metric = self.flat_values()
        return (
            _error(self.key, self.key_metric, key_map),
            _error(value, metric, maps.value_up.flatten(0, 1) @ maps.value_down.flatten(1)),
        )


@dataclass(frozen=True)
class GroupMaps:
    """Maps that merge the n heads of a group into one and read them back."""

    key_down: Tensor  # [d/2, n] complex
    key_up: Tensor  # [d/2, n] complex
    value_down: Tensor  # [e, n, e]
    value_up: Tensor  # [n, e, e]


def moments_of_heads(anatomy: AttentionAnatomy, statistics: LayerStatistics, *, weighted: bool) -> GroupMoments:
    """Compute the moments and metrics of all heads of a layer.

    With ``weighted``, metrics are the second moments of the loss gradients. If there are no gradients, keys are
    weighted by the energy of the queries and values by ``W_oᵀ W_o``. Otherwise metrics are plain errors. Without
    gradients keys and values share no unit, and both metrics are scaled so that errors are relative.
    """
    groups, width = anatomy.kv_heads, anatomy.value_dim
    keys = groups * anatomy.head_dim

    def values_of(matrix: Tensor) -> Tensor:
        return matrix[keys:, keys:].reshape(groups, width, groups, width)

    moment = statistics.gradient_weighted_moment if weighted else statistics.moment
    key = frequency_blocks(statistics.keys(moment, anatomy))
    value = values_of(moment)
    if weighted and statistics.metric is not None:
        # Halved: averaged over phases, (g . δ)² of real pairs is |conj(g) δ|² / 2.
        key_metric = frequency_blocks(statistics.keys(statistics.metric, anatomy)) / 2
        return GroupMoments(key, key_metric, value, values_of(statistics.metric))
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


def low_rank_maps(moments: GroupMoments) -> GroupMaps:
    """Compute the maps of least error in the metric: rank 1 per frequency for keys, rank e for values.

    With ``M^{1/2} C M^{1/2} = U Σ² U^H`` the best map of rank r is ``M^{-1/2} U_r U_r^H M^{1/2}``, and its error is the
    sum of the eigenvalues beyond r. ``C`` is uncentered, so biases and means need no extra term.

    The split into ``down`` and ``up`` is free. Factors of a group are scaled to 1 on average (root mean square for
    keys, ``Σ up_gᵀ up_g = n`` for values), so that merged weights are about as large as the source's.
    """
    heads, width = moments.value.shape[:2]
    root, inverse_root = psd_powers(damp(moments.key_metric), (0.5, -0.5))
    _, vectors = eigh_descending(root @ moments.key @ root)
    first = vectors[..., :1]
    key_down, key_up = (first.mH @ root)[..., 0, :], (inverse_root @ first)[..., 0]
    scale = key_up.abs().square().mean(-1, keepdim=True).sqrt()
    # The phase is free too; this choice leaves heads that agree unrotated.
    scale = torch.polar(scale, key_up.sum(-1, keepdim=True).angle())
    value, metric = moments.flat_values()
    down, up, _ = reduced_rank_projection(value, damp(metric), width)
    root, inverse_root = psd_powers(up.mT @ up / heads, (0.5, -0.5))
    return GroupMaps(
        key_down=key_down * scale,
        key_up=key_up / scale,
        value_down=(root @ down).unflatten(1, (heads, width)),
        value_up=(up @ inverse_root).unflatten(0, (heads, width)),
    )


def mean_maps(moments: GroupMoments) -> GroupMaps:
    """Compute the maps with which every head reads the mean of the group (mean pooling)."""
    heads, width = moments.value.shape[:2]
    ones = torch.ones(moments.key.shape[:2], dtype=moments.key.dtype)
    eye = torch.eye(width, dtype=moments.value.dtype).expand(heads, -1, -1)
    return GroupMaps(ones / heads, ones, eye.transpose(0, 1) / heads, eye)


def reorder_kv_heads(anatomy: AttentionAnatomy, order: Group) -> AttentionAnatomy:
    """Reorder the KV heads of a layer, together with their query heads and the columns of ``o``."""
    repeat = anatomy.heads // anatomy.kv_heads
    kv = torch.tensor(order, device=anatomy.k.device)
    query = (kv[:, None] * repeat + torch.arange(repeat, device=kv.device)).flatten()

    def pick(part: Tensor | None, index: Tensor) -> Tensor | None:
        return None if part is None else part[index]

    return replace(
        anatomy,
        q=anatomy.q[query],
        k=anatomy.k[kv],
        v=anatomy.v[kv],
        o=anatomy.o[:, query],
        q_bias=pick(anatomy.q_bias, query),
        k_bias=pick(anatomy.k_bias, kv),
        v_bias=pick(anatomy.v_bias, kv),
        sinks=pick(anatomy.sinks, query),
    )


def apply_maps(anatomy: AttentionAnatomy, groups: tuple[Group, ...], maps: list[GroupMaps]) -> AttentionAnatomy:
    """Apply the maps of every group to the weights. A bias is treated as an input channel that is always 1."""
    ordered = reorder_kv_heads(anatomy, sum(groups, ()))
    shape = (len(groups), len(groups[0]))
    key_down, key_up, value_down, value_up = (
        torch.stack([getattr(part, name) for part in maps]) for name in ("key_down", "key_up", "value_down", "value_up")
    )
    query = to_complex(affine(ordered.q, ordered.q_bias).mT).unflatten(0, (*shape, -1))  # [G', n, R, D + 1, d/2]
    query = query * key_up.conj().mT[:, :, None, None]
    key = to_complex(affine(ordered.k, ordered.k_bias).mT).unflatten(0, shape)  # [G', n, D + 1, d/2]
    key = torch.einsum("Glg,Ggxl->Gxl", key_down, key)
    value = torch.einsum("Gegf,Ggfx->Gex", value_down, affine(ordered.v, ordered.v_bias).unflatten(0, shape))
    out = torch.einsum("xGgre,Ggef->xGgrf", ordered.o.unflatten(1, (*shape, -1)), value_up)
    parts = {"q": to_real(query.flatten(0, 2)).mT, "k": to_real(key).mT, "v": value}
    biases = {
        name + "_bias": part[..., -1] for name, part in parts.items() if getattr(anatomy, name + "_bias") is not None
    }
    weights = {name: part[..., : anatomy.hidden].contiguous() for name, part in parts.items()}
    return replace(ordered, **weights, **biases, o=out.flatten(1, 3))


def affine(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Append the bias [h, d] to the weight [h, d, D] as a column, [h, d, D + 1]; without a bias return the weight."""
    return weight if bias is None else torch.cat([weight, bias[..., None]], dim=-1)


def adjacent_groups(heads: int, size: int) -> tuple[Group, ...]:
    """Group neighboring heads, in the checkpoint's order: ``((0, 1), (2, 3), ...)``."""
    return tuple(tuple(range(first, first + size)) for first in range(0, heads, size))


def cheapest_groups(heads: int, size: int, cost: Callable[[Group], float]) -> tuple[Group, ...]:
    """Partition ``range(heads)`` into ascending groups of ``size`` with the least sum of costs, ordered by first head.

    With few heads, every partition is tried. With many, the cost of a group is approximated by the sum over its pairs,
    groups are filled greedily, and heads are swapped until no swap helps; that is no worse than neighboring heads.
    ``cost`` is called once per group. Raises ValueError: ``size`` does not divide ``heads``.
    """
    if size < 1 or heads % size:
        raise ValueError(f"{heads} heads do not divide into groups of {size}")
    if size == 1:
        return adjacent_groups(heads, 1)
    cached_cost = cache(cost)
    if partition_count(heads, size) <= EXACT_PARTITIONS:
        return min(partitions(tuple(range(heads)), size), key=lambda groups: sum(map(cached_cost, groups)))
    pair_cost = {pair: cached_cost(pair) for pair in combinations(range(heads), 2)}

    def summed(group: Group) -> float:
        return sum(pair_cost[pair] for pair in combinations(sorted(group), 2))

    starts = (_greedy(heads, size, summed), adjacent_groups(heads, size))
    improved = [_swapped(list(start), summed) for start in starts]
    best = min(improved, key=lambda groups: sum(map(summed, groups)))
    return tuple(sorted(tuple(sorted(group)) for group in best))


def partition_count(heads: int, size: int) -> int:
    """Count the partitions of ``heads`` heads into groups of ``size``."""
    return prod(comb(rest - 1, size - 1) for rest in range(heads, 0, -size))


def partitions(heads: Group, size: int) -> Iterator[tuple[Group, ...]]:
    """Yield all partitions of ``heads`` into groups of ``size``, each once."""
    if not heads:
        yield ()
        return
    first, rest = heads[0], heads[1:]
    for others in combinations(rest, size - 1):
        remaining = tuple(head for head in rest if head not in others)
        for tail in partitions(remaining, size):
            yield ((first, *others), *tail)


def _greedy(heads: int, size: int, cost: Callable[[Group], float]) -> tuple[Group, ...]:
    """Fill groups one after the other: start with the cheapest remaining pair, then add the cheapest heads."""
    remaining, groups = set(range(heads)), []
    while remaining:
        group = min(combinations(sorted(remaining), 2), key=cost)
        remaining -= set(group)
        while len(group) < size:
            head = min(sorted(remaining), key=lambda head: cost((*group, head)))
            group = (*group, head)
            remaining.remove(head)
        groups.append(group)
    return tuple(groups)


def _swapped(groups: list[Group], cost: Callable[[Group], float]) -> list[Group]:
    """Swap heads between groups until no swap helps."""
    improved = True
    while improved:
        improved = False
        for a, b in combinations(range(len(groups)), 2):
            for i, j in product(range(len(groups[a])), repeat=2):
                first, second = list(groups[a]), list(groups[b])
                first[i], second[j] = second[j], first[i]
                before = cost(groups[a]) + cost(groups[b])
                # The margin keeps rounding from alternating two swaps forever.
                if cost(tuple(first)) + cost(tuple(second)) < before * (1 - 1e-9):
                    groups[a], groups[b], improved = tuple(first), tuple(second), True
    return groups


def _error(moment: Tensor, metric: Tensor, projection: Tensor) -> float:
    """Compute ``E (z - P z)^H M (z - P z)``, summed over a batch of [n, n] matrices."""
    rest = torch.eye(moment.shape[-1], dtype=moment.dtype) - projection
    return float((metric * (rest @ moment @ rest.mH).mT).sum().real)
