"""The remote code's entry module where converted layers have other numbers of KV heads.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .grouped_attention import GroupedAttention


class SurgeryForCausalLM(BaseModel):
    """The class that `auto_map` in config.json names."""


__all__ = ["GroupedAttention", "SurgeryForCausalLM"]
