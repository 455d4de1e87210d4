"""Entry module of the remote code for MLA with a cache of packed rows.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .compact_caches import new_layers
from .quantized_latent_attention import QuantizedLatentAttention


class SurgeryForCausalLM(BaseModel):
    """Causal language model class named by `auto_map` in config.json."""


__all__ = ["QuantizedLatentAttention", "SurgeryForCausalLM", "new_layers"]
