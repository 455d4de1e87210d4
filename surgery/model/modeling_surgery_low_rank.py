"""The remote code's entry module where converted layers are low-rank attention.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .compact_caches import new_layers
from .low_rank_attention import LowRankAttention


class SurgeryForCausalLM(BaseModel):
    """The class that `auto_map` in config.json names."""


__all__ = ["LowRankAttention", "SurgeryForCausalLM", "new_layers"]
