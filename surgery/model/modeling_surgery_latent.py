"""The remote code's entry module where converted layers are MLA.

This file travels beside the weights as remote code: it may import torch, transformers and its neighbors, nothing else.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .latent_attention import LatentAttention


class SurgeryForCausalLM(BaseModel):
    """The class that `auto_map` in config.json names."""


__all__ = ["LatentAttention", "SurgeryForCausalLM"]
