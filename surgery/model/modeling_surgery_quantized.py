"""Entry module of the remote code for quantized caches of stock attention, fewer KV heads or MLA.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .compact_caches import new_layers
from .grouped_attention import GroupedAttention
from .latent_attention import LatentAttention
from .quantized_cache import QuantizedKVLayer
from .token_codes import TokenCodes


class SurgeryForCausalLM(BaseModel):
    """Causal language model class named by `auto_map` in config.json."""


__all__ = [
    "GroupedAttention",
    "LatentAttention",
    "QuantizedKVLayer",
    "SurgeryForCausalLM",
    "TokenCodes",
    "new_layers",
]
