"""Entry module of the remote code with all parts, for checkpoints that no smaller entry module covers.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .axis_decoder import AxisDecoder
from .causal_model import SurgeryForCausalLM as BaseModel
from .compact_caches import new_layers
from .family_decoders import DECODERS
from .grouped_attention import GroupedAttention
from .hybrid_attention import HybridAttention
from .latent_attention import LatentAttention
from .low_rank_attention import LowRankAttention
from .quantized_cache import QuantizedKVLayer
from .quantized_latent_attention import QuantizedLatentAttention
from .quantized_low_rank_attention import QuantizedLowRankAttention
from .streaming_latent_attention import StreamingLatentAttention
from .token_codes import TokenCodes


class SurgeryForCausalLM(BaseModel):
    """Causal language model class named by `auto_map` in config.json."""


__all__ = [
    "DECODERS",
    "AxisDecoder",
    "GroupedAttention",
    "HybridAttention",
    "LatentAttention",
    "LowRankAttention",
    "QuantizedKVLayer",
    "QuantizedLatentAttention",
    "QuantizedLowRankAttention",
    "StreamingLatentAttention",
    "SurgeryForCausalLM",
    "TokenCodes",
    "new_layers",
]
