"""The remote code's entry module where converted layers have other numbers of KV heads.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .grouped_attention import GroupedAttention


class SurgeryForCausalLM(BaseModel):
    """The class that `auto_map` in config.json names."""


__all__ = ["GroupedAttention", "SurgeryForCausalLM"]
