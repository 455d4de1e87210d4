"""Entry module of the remote code for mixed kinds of layers and caches.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .compact_caches import new_layers
from .grouped_attention import GroupedAttention
from .hybrid_attention import HybridAttention
from .latent_attention import LatentAttention
from .low_rank_attention import LowRankAttention
from .quantized_cache import QuantizedKVLayer
from .streaming_latent_attention import StreamingLatentAttention
from .token_codes import TokenCodes


class SurgeryForCausalLM(BaseModel):
    """Causal language model class named by `auto_map` in config.json."""


__all__ = [
    "GroupedAttention",
    "HybridAttention",
    "LatentAttention",
    "LowRankAttention",
    "QuantizedKVLayer",
    "StreamingLatentAttention",
    "SurgeryForCausalLM",
    "TokenCodes",
    "new_layers",
]
