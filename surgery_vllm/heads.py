"""Attention with full KV heads, which see all tokens, and streaming ones, which see sinks and a window.

Definition of streaming heads: ``surgery/model/hybrid_attention.py``. Shapes: T tokens of a batch, H query heads, G KV
heads, d head_dim, D hidden size.

The full heads of all layers form one KV cache group of vLLM, the streaming heads another. In each group one layer owns
the blocks, which have the heads of all layers, and the other layers share them. So blocks have one size, whatever the
number of heads per layer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from surgery_vllm import sink_window
from surgery_vllm.block_sizes import block_sizes
from surgery_vllm.heads_backend import PagedHeadsBackend
from surgery_vllm.structure import attention_of_layers


class HeadGroup(Attention):
    """Full or streaming heads of one layer, in blocks shared with the same heads of all layers."""

    def __init__(
        self, config: Any, kind: str, head_dim: int, query_heads: int, cache_config: CacheConfig | None, prefix: str
    ):
        layers, number = attention_of_layers(config), extract_layer_index(prefix)
        layer, name = layers[number], f"{prefix}.{kind}"
        heads = {"full": [each.full_heads for each in layers], "streaming": [each.streaming_heads for each in layers]}
        owner = next(index for index, count in enumerate(heads[kind]) if count)
        first, count = sum(heads[kind][:number]), heads[kind][number]
        super().__init__(
            num_heads=query_heads,
            head_size=head_dim,
            scale=head_dim**-0.5,
            num_kv_heads=count,
            cache_config=cache_config,
            prefix=name,
            attn_backend=PagedHeadsBackend,
            kv_sharing_target_layer_name=None if owner == number else name.replace(f".{number}.", f".{owner}.", 1),
            head_slice=slice(first, first + count),
            sinks=0 if kind == "full" else layer.sinks,
            recent=None if kind == "full" else layer.recent,
        )
        self.kind, self.layer = kind, layer
        self.heads_of_all = {each: sum(counts) for each, counts in heads.items()}

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Return the cache spec of this group's heads of all layers."""
        full, streaming = block_sizes(*self.heads_of_all.values(), vllm_config.cache_config.block_size)
        options = {"head_size": self.head_size, "dtype": self.kv_cache_torch_dtype}
        options["num_kv_heads"] = self.heads_of_all[self.kind]
        if self.kind == "full":
            return FullAttentionSpec(block_size=full, **options)
        window = {"sinks": self.layer.sinks, "sliding_window": self.layer.recent}
        return sink_window.SinkWindowSpec(block_size=streaming, **window, **options)


class SplitAttention(nn.Module):
    """Attention of one layer with full and streaming heads; weights are the family's."""

    def __init__(
        self,
        config: Any,
        max_position_embeddings: int,
        cache_config: CacheConfig | None,
        bias: bool,
        bias_o_proj: bool,
        prefix: str,
    ):
        super().__init__()
        check(get_current_vllm_config())
        layer = attention_of_layers(config)[extract_layer_index(prefix)]
        heads, kv_heads = config.num_attention_heads, layer.full_heads + layer.streaming_heads
        hidden = config.hidden_size
        self.head_dim = getattr(config, "head_dim", None) or hidden // heads
        self.widths = [count * self.head_dim for count in (heads, kv_heads, kv_heads)]
        self.qkv_proj = QKVParallelLinear(
            hidden, self.head_dim, heads, kv_heads, bias=bias, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = RowParallelLinear(heads * self.head_dim, hidden, bias=bias_o_proj, prefix=f"{prefix}.o_proj")
        self.q_norm = self.k_norm = None
        if config.base_model_type == "qwen3":
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = get_rope(self.head_dim, max_position_embeddings, rope_parameters=config.rope_parameters)
        self.groups = nn.ModuleDict()
        for kind, count in (("full", layer.full_heads), ("streaming", layer.streaming_heads)):
            if count:
                query_heads = heads // kv_heads * count
                self.groups[kind] = HeadGroup(config, kind, self.head_dim, query_heads, cache_config, prefix)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Compute the output [T, D] of hidden_states [T, D] at positions [T]."""
        query, key, value = self.qkv_proj(hidden_states)[0].split(self.widths, dim=-1)
        if self.q_norm is not None:
            query, key = self._normalized(self.q_norm, query), self._normalized(self.k_norm, key)
        query, key = self.rotary_emb(positions, query, key)
        # Query heads are in the order of their KV heads: full heads first.
        groups = list(self.groups.values())
        queries = query.split([group.num_heads * self.head_dim for group in groups], dim=-1)
        keys, values = (x.split([group.num_kv_heads * self.head_dim for group in groups], dim=-1) for x in (key, value))
        out = [
            group(*(x.contiguous() for x in part)) for group, *part in zip(groups, queries, keys, values, strict=True)
        ]
        return self.o_proj(torch.cat(out, dim=-1))[0]

    def _normalized(self, norm: nn.Module, heads: Tensor) -> Tensor:
        """Normalize each head of [T, ·d] separately."""
        return norm(heads.unflatten(-1, (-1, self.head_dim)).contiguous()).flatten(-2)


def check(vllm_config: VllmConfig) -> None:
    """Refuse settings of vLLM under which blocks between sinks and window would not be freed or tracked.

    Raises:
        ValueError: names the setting to change.
    """
    if vllm_config.parallel_config.world_size > 1:
        raise ValueError("model-surgery's plugin serves hybrid heads in one process: leave parallel sizes at 1")
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ValueError("hybrid heads need the hybrid KV cache manager: leave out --disable-hybrid-kv-cache-manager")
    if vllm_config.speculative_config is not None:
        raise ValueError("model-surgery's plugin does not serve hybrid heads with --speculative-config; leave it out")
