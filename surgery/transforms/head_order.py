"""Reordering of a layer's attention heads: permutes rows and columns, and leaves the function unchanged bit for bit.

DuoAttention (arXiv:2410.10819) stores retrieval heads before streaming heads, so that the two caches of a layer are two
slices. Query heads move with their KV head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ROWS, COLUMNS = ("q_proj", "k_proj", "v_proj"), ("o_proj",)


def permute_heads(tensors: Mapping[str, Tensor], order: Sequence[int]) -> dict[str, Tensor]:
    """Move KV head ``order[i]`` to index i in a layer's attention tensors, which are keyed by their names in the layer.

    Permutes rows of ``q_proj``, ``k_proj`` and ``v_proj`` (weights [G·n, D], biases [G·n]), weights of norms over all
    heads [G·n] and columns of ``o_proj.weight`` [D, G·n], n of them per KV head. Other tensors, such as norms of each
    head, are shared by all heads and stay unchanged. Raises ValueError: ``order`` is not a permutation.
    """
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"{list(order)} is not a permutation of {len(order)} heads")
    index = torch.tensor(order)
    moved = dict(tensors)
    for name, tensor in tensors.items():
        projection, _, kind = name.partition(".")
        if projection in ROWS or _over_all_heads(projection, tensor, tensors):
            moved[name] = tensor.unflatten(0, (len(order), -1))[index].flatten(0, 1)
        elif projection in COLUMNS and kind == "weight":
            moved[name] = tensor.unflatten(1, (len(order), -1))[:, index].flatten(1)
    return moved


def _over_all_heads(module: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor is the weight of a norm over all query or key heads together."""
    normed = tensors.get(f"{module.removesuffix('_norm')}_proj.weight")
    return module.endswith("_norm") and normed is not None and tensor.numel() == len(normed)
