"""Entry module of the remote code for layers that share a cache.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .blockwise_decoder import BlockwiseDecoder
from .causal_model import SurgeryForCausalLM as BaseModel
from .cross_layer_attention import CrossLayerAttention
from .cross_layer_latent_attention import CrossLayerLatentAttention


class SurgeryForCausalLM(BaseModel):
    """Causal language model class named by `auto_map` in config.json."""


__all__ = ["BlockwiseDecoder", "CrossLayerAttention", "CrossLayerLatentAttention", "SurgeryForCausalLM"]
