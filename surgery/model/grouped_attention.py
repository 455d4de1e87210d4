"""The family's own attention with a different number of KV heads per layer.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

import copy

from torch import nn

from .attention_functions import ConvertedAttention
from .grouped_entry import GroupedEntry


class GroupedAttention(ConvertedAttention, nn.Module):
    """Grouped-query attention with `kv_heads` KV heads in place of the config's `num_key_value_heads`.

    Forward pass, tensor names, windows and norms are the family's. Keys and values are cached as plain tensors
    [B, kv_heads, T, d].
    """

    def __init__(self, stock: nn.Module, entry: GroupedEntry):
        config = copy.copy(stock.config)
        config.num_key_value_heads = entry.kv_heads
        # The class built by `family_attention_class` has the family's attention next in line.
        super().__init__(config, stock.layer_idx)
        # From here on only the attention implementation is read, which users set on the model's config.
        self.config = stock.config
        self.num_kv_heads = entry.kv_heads
