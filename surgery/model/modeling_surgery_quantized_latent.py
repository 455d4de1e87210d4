"""The remote code's entry module where converted layers are MLA with a cache of packed rows.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .compact_caches import new_layers
from .quantized_latent_attention import QuantizedLatentAttention


class SurgeryForCausalLM(BaseModel):
    """The class that `auto_map` in config.json names."""


__all__ = ["QuantizedLatentAttention", "SurgeryForCausalLM", "new_layers"]
