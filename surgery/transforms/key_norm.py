"""Key-driven GQA: KV heads with larger keys are read by more query heads (arXiv 2408.08454, section 3).

Heads are mean-pooled. Then query heads are assigned to KV heads in order, their number proportional to the norm of the
pooled keys. A query head may end up with a pooled key that its original key is not part of; only training can repair
that. The method is for comparison with the paper.

Stock classes give every KV head equally many query heads. Smaller groups are padded with query heads whose weights in
W_q and W_o are zero, so their output is zero.
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
    """Compute root mean square norms [kv_heads] of mean-pooled keys of neighboring heads, before RoPE.

    Args:
        anatomy: the source layer; ``kv_heads`` divides its KV heads.
    """
    size = anatomy.kv_heads // kv_heads
    products = statistics.keys(statistics.moment, anatomy).diagonal(dim1=1, dim2=3).sum(-1)  # [G, G], E k_g . k_h
    blocks = products.view(kv_heads, size, kv_heads, size).sum((1, 3))
    return blocks.diagonal().sqrt() / size


def deal_queries(norms: Tensor, heads: int) -> list[int]:
    """Split ``heads`` query heads over the KV heads in proportion to the norms [G'], at least one each.

    Raises SurgeryError: there are fewer query heads than KV heads.
    """
    return proportional(norms.tolist(), heads)


def padded_group(largest: int, kv_heads: int, hidden: int) -> int:
    """Compute the least group size, from ``largest`` on, with which the number of query heads divides the hidden size.

    Configs of several families require the latter, whatever the head width. Raises SurgeryError: there is no such size.
    """
    for size in range(largest, hidden // kv_heads + 1):
        if hidden % (kv_heads * size) == 0:
            return size
    raise SurgeryError(f"{largest} query heads per KV head with {kv_heads} KV heads exceed the hidden size {hidden}")


def pad_groups(anatomy: AttentionAnatomy, counts: Sequence[int], size: int) -> AttentionAnatomy:
    """Assign the next ``counts[i]`` query heads to KV head i and pad each group with zero heads to ``size``."""
    positions = torch.tensor(
        [i * size + j for i, count in enumerate(counts) for j in range(count)], device=anatomy.q.device
    )
    heads = len(counts) * size

    def spread(tensor: Tensor, dim: int) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = heads
        return tensor.new_zeros(shape).index_copy(dim, positions, tensor)

    return replace(
        anatomy,
        q=spread(anatomy.q, 0),
        o=spread(anatomy.o, 1),
        q_bias=None if anatomy.q_bias is None else spread(anatomy.q_bias, 0),
        sinks=None if anatomy.sinks is None else spread(anatomy.sinks, 0),
    )
