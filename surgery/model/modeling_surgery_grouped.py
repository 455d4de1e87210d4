"""Entry module of the remote code for layers with a different number of KV heads.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .grouped_attention import GroupedAttention


class SurgeryForCausalLM(BaseModel):
    """Causal language model class named by `auto_map` in config.json."""


__all__ = ["GroupedAttention", "SurgeryForCausalLM"]
