"""Key-driven GQA: KV heads with larger keys are read by more query heads (arXiv 2408.08454, section 3).

Heads are mean-pooled, and then the query heads are dealt to the KV heads in order, in numbers proportional to the norms
of the pooled keys. A query head may so come to read a key that its own was no part of, which nothing repairs without
training: this is for comparison with the paper.

Stock classes give every KV head equally many query heads. Smaller groups are filled up with query heads whose weights
in W_q and W_o are zero: they put out nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from surgery.calibration.statistics import LayerStatistics
from surgery.common.errors import SurgeryError
from surgery.families.anatomy import AttentionAnatomy
from surgery.transforms.allocation import proportional


def pooled_key_norms(anatomy: AttentionAnatomy, statistics: LayerStatistics, kv_heads: int) -> Tensor:
    """Root mean square norms [kv_heads] of the means of neighboring heads' keys, before the rotation.

    Args:
        anatomy: of the source's layer, whose KV heads ``kv_heads`` divides.
    """
    size = anatomy.kv_heads // kv_heads
    products = statistics.keys(statistics.moment, anatomy).diagonal(dim1=1, dim2=3).sum(-1)  # [G, G], E k_g . k_h
    blocks = products.view(kv_heads, size, kv_heads, size).sum((1, 3))
    return blocks.diagonal().sqrt() / size


def deal_queries(norms: Tensor, heads: int) -> list[int]:
    """Return how many of ``heads`` query heads each KV head gets: in proportion to the norms [G'], one at least.

    Raises:
        SurgeryError: there are fewer query heads than KV heads.
    """
    return proportional(norms.tolist(), heads)


def padded_group(largest: int, kv_heads: int, hidden: int) -> int:
    """The size of groups that holds ``largest`` query heads and makes all heads divide the hidden size.

    Some families' configs insist on the latter, whatever the width of their heads.

    Raises:
        SurgeryError: there is none.
    """
    for size in range(largest, hidden // kv_heads + 1):
        if hidden % (kv_heads * size) == 0:
            return size
    raise SurgeryError(f"groups of {largest} query heads on {kv_heads} KV heads exceed the hidden size {hidden}")


def pad_groups(anatomy: AttentionAnatomy, counts: Sequence[int], size: int) -> AttentionAnatomy:
    """The layer in which KV head i is read by the next ``counts[i]`` query heads, and by silent ones up to ``size``.

    Args:
        anatomy: as many KV heads as there are counts, which sum to its query heads.
        size: of every group of the result.
    """
    places = torch.tensor(
        [i * size + j for i, count in enumerate(counts) for j in range(count)], device=anatomy.q.device
    )
    heads = len(counts) * size

    def spread(tensor: Tensor, dim: int) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = heads
        return tensor.new_zeros(shape).index_copy(dim, places, tensor)

    return replace(
        anatomy,
        q=spread(anatomy.q, 0),
        o=spread(anatomy.o, 1),
        q_bias=None if anatomy.q_bias is None else spread(anatomy.q_bias, 0),
        sinks=None if anatomy.sinks is None else spread(anatomy.sinks, 0),
    )
