"""The remote code's entry module where converted layers are low-rank attention.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .compact_caches import new_layers
from .low_rank_attention import LowRankAttention


class SurgeryForCausalLM(BaseModel):
    """The class that `auto_map` in config.json names."""


__all__ = ["LowRankAttention", "SurgeryForCausalLM", "new_layers"]
