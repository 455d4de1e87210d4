"""Entry module of the remote code for low-rank attention with a cache of packed rows.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from .causal_model import SurgeryForCausalLM as BaseModel
from .compact_caches import new_layers
from .quantized_low_rank_attention import QuantizedLowRankAttention


class SurgeryForCausalLM(BaseModel):
    """Causal language model class named by `auto_map` in config.json."""


__all__ = ["QuantizedLowRankAttention", "SurgeryForCausalLM", "new_layers"]
