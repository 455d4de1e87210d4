"""The family's own attention with a number of KV heads of its own, so that layers may differ.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

import copy

from torch import nn

from .attention_functions import ConvertedAttention
from .grouped_entry import GroupedEntry


class GroupedAttention(ConvertedAttention, nn.Module):
    """Grouped-query attention with `kv_heads` KV heads in place of the config's `num_key_value_heads`.

    Everything but that number is the family's: forward pass, names of the tensors, windows, norms. Keys and values are
    cached as plain tensors [B, kv_heads, T, d] each.
    """

    def __init__(self, stock: nn.Module, entry: GroupedEntry):
        config = copy.copy(stock.config)
        config.num_key_value_heads = entry.kv_heads
        # The class built by `family_attention_class` has the family's attention next in line.
        super().__init__(config, stock.layer_idx)
        # From here on only the attention implementation is read of it, which users change on the model's.
        self.config = stock.config
        self.num_kv_heads = entry.kv_heads
