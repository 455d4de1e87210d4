"""The remote code's entry module where some heads of converted layers stream.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .compact_caches import new_layers
from .hybrid_attention import HybridAttention


class SurgeryForCausalLM(BaseModel):
    """The class that `auto_map` in config.json names."""


__all__ = ["HybridAttention", "SurgeryForCausalLM", "new_layers"]
