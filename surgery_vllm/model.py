"""vLLM model class: vLLM's Llama (also Mistral and Qwen2, which compute the same) with converted attention."""

from typing import Any

from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.utils import WeightsMapper, extract_layer_index

from surgery.model.hybrid_entry import HybridEntry
from surgery.model.latent_entry import LatentEntry
from surgery.model.low_rank_entry import LowRankEntry
from surgery_vllm.attention import LatentAttention, QuantizedLatentAttention
from surgery_vllm.heads import SplitAttention
from surgery_vllm.low_rank import LowRankAttention, QuantizedLowRankAttention
from surgery_vllm.structure import attention_of_layers

_FUSED_MLP = {".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 1)}


def _attention(
    *, config: Any, prefix: str, num_kv_heads: int, bias: bool, bias_o_proj: bool, cache_config: Any, **more: Any
) -> nn.Module:
    """Build the attention of a :class:`LlamaDecoderLayer` from its layer's entry, instead of `LlamaAttention`."""
    layer = attention_of_layers(config)[extract_layer_index(prefix)]
    options = {"cache_config": cache_config, "bias": bias, "bias_o_proj": bias_o_proj, "prefix": prefix}
    if isinstance(layer, LatentEntry):
        kind = QuantizedLatentAttention if layer.quantizes else LatentAttention
        return kind(config, layer, **options)
    if isinstance(layer, HybridEntry):
        return SplitAttention(config, more["max_position_embeddings"], **options)
    if isinstance(layer, LowRankEntry):
        kind = QuantizedLowRankAttention if layer.quantizes else LowRankAttention
        return kind(config, layer, more["max_position_embeddings"], **options)
    return LlamaAttention(config, num_kv_heads=layer.kv_heads, **options, **more)


class SurgeryDecoderLayer(LlamaDecoderLayer):
    """Decoder layer with the attention of its entry in `attention_layers`."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None):
        super().__init__(vllm_config, prefix, config, attn_layer_type=_attention)


@support_torch_compile
class SurgeryModel(LlamaModel):
    """Llama decoder that loads tensors by their checkpoint names; projections of latent layers are not fused."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] = SurgeryDecoderLayer):
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)
        stacked = dict(_FUSED_MLP)
        for number, layer in enumerate(attention_of_layers(self.config)):
            if not isinstance(layer, LatentEntry | LowRankEntry):
                attention_prefix = f"layers.{number}.self_attn."
                stacked |= {
                    f"{attention_prefix}{shard}_proj": (f"{attention_prefix}qkv_proj", shard) for shard in "qkv"
                }
        self.hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked=stacked)


class SurgeryForCausalLM(LlamaForCausalLM):
    """vLLM's counterpart of ``surgery.model.SurgeryForCausalLM``."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked=_FUSED_MLP)
    supports_lora = False  # fused and sliced weights do not match adapters

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        if vllm_config.quant_config is not None:
            raise ValueError("model-surgery's plugin does not support quantized weights; leave --quantization out")
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=SurgeryDecoderLayer)

    def _init_model(self, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] = SurgeryDecoderLayer):
        return SurgeryModel(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)
