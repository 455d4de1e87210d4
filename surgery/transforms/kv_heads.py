"""Merging of KV heads: each group becomes one head, and the result is a plain checkpoint of the source's family.

RoPE multiplies the pair of frequency ``l`` of every head by one phase, so heads may be mixed by a complex number per
head and frequency. A group of heads g keeps one shared key ``b_l = Σ_g down_{g,l} k_{g,l}``, and head g reads it as
``up_{g,l} b_l``. Since ``Re(conj(q) up b) = Re(conj(conj(up) q) b)``, the factor is merged into the query pair, before
or after RoPE. Values are mixed by real matrices, ``v' = down v`` read as ``up_g v'``, and ``up_g`` is merged into W_o.

A method is a choice of ``down`` and ``up``:

============ ============================ ============================= =========
method       keys, per frequency          values                        groups
============ ============================ ============================= =========
fisher       rank 1 in the metric of the  rank e in the metric of the   cheapest
             loss gradients               loss gradients
kv-heads     rank 1, plain error          rank e, plain error           adjacent
mean-pool    mean                         mean                          adjacent
============ ============================ ============================= =========

Sources: mean-pool, GQA (arXiv 2305.13245); kv-heads, arXiv 2406.07056. Key-driven query allocation (arXiv 2408.08454)
starts from mean-pool; see :mod:`surgery.transforms.key_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from surgery.calibration.statistics import LayerStatistics
from surgery.common.errors import SurgeryError
from surgery.common.plugins import Registry
from surgery.families.anatomy import AttentionAnatomy
from surgery.transforms.head_grouping import (
    Group,
    GroupMaps,
    GroupMoments,
    adjacent_groups,
    apply_maps,
    cheapest_groups,
    low_rank_maps,
    mean_maps,
    moments_of_heads,
)


@dataclass(frozen=True)
class Method:
    """Definition of a named method: maps of a group from its moments.

    It is weighted by the metric of the loss or by plain errors, and searches the cheapest groups or merges neighbors.
    """

    maps: Callable[[GroupMoments], GroupMaps]
    weighted: bool = False
    searches: bool = False


METHODS: Registry[Method] = Registry(
    "kv_heads_methods",
    {
        "fisher": Method(low_rank_maps, weighted=True, searches=True),
        "kv-heads": Method(low_rank_maps),
        "mean-pool": Method(mean_maps),
    },
    Method,
)


@dataclass(frozen=True)
class MergedLayer:
    """Layer with fewer KV heads, and its predicted errors.

    The errors use the same metric for every method. With loss gradients each is twice the predicted loss increase in
    nats per token, to second order. Without gradients they are relative: to the energy of the scores for keys, and of
    the output for values.

    Attributes:
        anatomy: the source's shapes, except for the number of KV heads; query heads are in the order of ``groups``.
        groups: the source's KV heads that each KV head replaces.
        key_error, value_error: None if the query heads of a group read keys that their original key is not part of.
    """

    anatomy: AttentionAnatomy
    groups: tuple[Group, ...]
    key_error: float | None
    value_error: float | None


def merge_kv_heads(
    anatomy: AttentionAnatomy, statistics: LayerStatistics, kv_heads: int, method: str = "fisher"
) -> MergedLayer:
    """Merge the KV heads of a layer in groups of equal size.

    Args:
        anatomy: the layer, float64 on the CPU like the statistics.
        statistics: statistics of this layer. Without gradients, the method "fisher" weights keys by the energies of
            their queries and values by ``W_oᵀ W_o``.
        kv_heads: number of heads to keep, a divisor of the source's.
        method: a key of ``METHODS``.

    Raises:
        SurgeryError: an unknown method, a number of heads that does not divide the source's, or a layer with a query
            or key norm: the factors of a merge would have to apply after the norm, where there is no weight.
    """
    if method not in METHODS:
        raise SurgeryError(f"method {method!r} is unknown: choose {', '.join(METHODS)}", setting="method")
    if not 0 < kv_heads < anatomy.kv_heads or anatomy.kv_heads % kv_heads:
        raise SurgeryError(
            f"{kv_heads} KV heads: choose a smaller number that divides the {anatomy.kv_heads} of the source"
        )
    if anatomy.q_norm is not None or anatomy.k_norm is not None:
        raise SurgeryError(
            "KV heads with a q/k-norm cannot be merged, as factors do not pass the norm: convert --to mla instead"
        )
    merge_method, size = METHODS[method], anatomy.kv_heads // kv_heads
    loss = moments_of_heads(anatomy, statistics, weighted=True)
    own = loss if merge_method.weighted else moments_of_heads(anatomy, statistics, weighted=False)
    groups = adjacent_groups(anatomy.kv_heads, size)
    if merge_method.searches:

        def cost(group: Group) -> float:
            moments = own.of(group)
            return sum(moments.errors(merge_method.maps(moments)))

        groups = cheapest_groups(anatomy.kv_heads, size, cost)
    maps = [merge_method.maps(own.of(group)) for group in groups]
    errors = [loss.of(group).errors(part) for group, part in zip(groups, maps, strict=True)]
    key_error, value_error = (sum(kind) for kind in zip(*errors, strict=True))
    return MergedLayer(apply_maps(anatomy, groups, maps), groups, key_error, value_error)
