"""``--to gqa --method first-of-group``: every KV head of a group becomes the first one of it. A bad idea, too."""

import torch

from surgery.transforms.head_grouping import GroupMaps, mean_maps
from surgery.transforms.kv_heads import Method


def first(moments):
    """The first head in place of the mean of all."""
    mean = mean_maps(moments)
    key, value = torch.zeros_like(mean.key_down), torch.zeros_like(mean.value_down)
    key[:, 0], value[:, 0] = 1, mean.value_up[0]
    return GroupMaps(key, mean.key_up, value, mean.value_up)


METHOD = Method(first)
