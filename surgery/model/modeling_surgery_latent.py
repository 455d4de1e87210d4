"""The remote code's entry module where converted layers are MLA.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .latent_attention import LatentAttention


class SurgeryForCausalLM(BaseModel):
    """The class that `auto_map` in config.json names."""


__all__ = ["LatentAttention", "SurgeryForCausalLM"]
