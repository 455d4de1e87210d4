"""The remote code's entry module where layers with the family's own attention, fewer KV heads or MLA quantize.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .compact_caches import new_layers
from .grouped_attention import GroupedAttention
from .latent_attention import LatentAttention
from .quantized_cache import QuantizedKVLayer
from .token_codes import TokenCodes


class SurgeryForCausalLM(BaseModel):
    """The class that `auto_map` in config.json names."""


__all__ = [
    "GroupedAttention",
    "LatentAttention",
    "QuantizedKVLayer",
    "SurgeryForCausalLM",
    "TokenCodes",
    "new_layers",
]
