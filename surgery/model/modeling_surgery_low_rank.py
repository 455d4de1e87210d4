"""Entry module of the remote code for low-rank attention.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .compact_caches import new_layers
from .low_rank_attention import LowRankAttention


class SurgeryForCausalLM(BaseModel):
    """Causal language model class named by `auto_map` in config.json."""


__all__ = ["LowRankAttention", "SurgeryForCausalLM", "new_layers"]
