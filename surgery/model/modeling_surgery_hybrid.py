"""Entry module of the remote code for layers with streaming heads.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .compact_caches import new_layers
from .hybrid_attention import HybridAttention


class SurgeryForCausalLM(BaseModel):
    """Causal language model class named by `auto_map` in config.json."""


__all__ = ["HybridAttention", "SurgeryForCausalLM", "new_layers"]
