"""The remote code's entry module where converted layers are low-rank attention with a cache of packed rows.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .compact_caches import new_layers
from .quantized_low_rank_attention import QuantizedLowRankAttention


class SurgeryForCausalLM(BaseModel):
    """The class that `auto_map` in config.json names."""


__all__ = ["QuantizedLowRankAttention", "SurgeryForCausalLM", "new_layers"]
