"""Attention that caches latents and rebuilds keys and values of all tokens at every step: memory, not speed.

Formulas and names of weights: ``surgery/model/low_rank_attention.py``. Shapes here: T tokens of a batch, S tokens of a
request, H query heads, G KV heads, d head_dim, D hidden size, r numbers of all latents of a token.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import _encode_layer_name, is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec

from surgery_vllm.backend import PagedMetadata
from surgery_vllm.heads_backend import PagedHeadsBackend
from surgery_vllm.paged import paged_rebuilt_attention, write_slots
from surgery_vllm.structure import attention_of_layers


class LowRankBackend(PagedHeadsBackend):
    """Backend of low rank for any device that PyTorch runs on; no CUDA graphs."""

    @staticmethod
    def get_impl_cls() -> type["LowRankImpl"]:
        return LowRankImpl


class LowRankImpl(AttentionImpl[PagedMetadata]):
    """The attention of one layer.

    Attributes:
        rebuild: see :func:`paged_rebuilt_attention`; set by the layer.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: None,
        sliding_window: None,
        kv_cache_dtype: str,
        *unused: Any,
    ):
        if is_quantized_kv_cache(kv_cache_dtype):
            raise ValueError(f"--kv-cache-dtype {kv_cache_dtype}: latents are cached as they are, leave it out")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        self.rebuild = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor,
        output_scale: None = None,
        output_block_scale: None = None,
    ) -> Tensor:
        """Writes the latents `key` [T, 1, r] to their slots, and to output [T, H, d] what queries [T, H, d] see."""
        if attn_metadata is None:  # vLLM measures the memory of a pass
            return output.zero_()
        cache = kv_cache[:, 0]
        write_slots(cache, key.squeeze(1), attn_metadata.slot_mapping)
        for span in attn_metadata.spans:
            output[span.tokens] = paged_rebuilt_attention(
                query[span.tokens],
                cache,
                span,
                self.scale,
                self.rebuild,
            )
        return output


class LatentCache(Attention):
    """Takes latents in the place of keys and values; its cache holds r numbers a token."""

    def __init__(self, rank: int, **said: Any):
        super().__init__(num_kv_heads=1, attn_backend=LowRankBackend, **said)
        self.rank = rank

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        """One head of r numbers, and none of a value."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.rank,
            head_size_v=0,
            dtype=self.kv_cache_torch_dtype,
        )

    def forward(self, query: Tensor, latent: Tensor) -> Tensor:
        """query [T, H, d], latent [T, r] → [T, H·d]."""
        output, latent = torch.empty_like(query), latent.unsqueeze(1)
        name = _encode_layer_name(self.layer_name)
        # vLLM's own way around a compiler; `Attention.forward` wants keys as wide as queries.
        torch.ops.vllm.unified_attention_with_output(query, latent, latent, output, name)
        return output.flatten(1)


class LowRankAttention(nn.Module):
    """One layer."""

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
        if get_current_vllm_config().parallel_config.tensor_parallel_size > 1:
            raise ValueError("model-surgery's plugin serves low rank in one process: leave --tensor-parallel-size out")
        blocks = attention_of_layers(config)[extract_layer_index(prefix)].blocks
        hidden, self.heads = config.hidden_size, config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or hidden // self.heads
        width = self.heads * self.head_dim
        self.ranks = [block.rank for block in blocks]
        self.q_proj = ReplicatedLinear(hidden, width, bias=bias, prefix=f"{prefix}.q_proj")
        self.o_proj = ReplicatedLinear(width, hidden, bias=bias_o_proj, prefix=f"{prefix}.o_proj")
        self.kv_down = ReplicatedLinear(hidden, sum(self.ranks), bias=False, prefix=f"{prefix}.kv_down")
        self.key_up = self._ups([(block.rank, len(block.keys)) for block in blocks])
        self.value_up = self._ups([(block.rank, len(block.values)) for block in blocks])
        # Where each head's rows are among those of the blocks.
        for name in ("keys", "values"):
            order = _order([head for block in blocks for head in getattr(block, name)])
            self.register_buffer(f"order_of_{name}", order, persistent=False)
        kv_width = config.num_key_value_heads * self.head_dim
        self.key_bias, self.value_bias = (
            nn.Parameter(torch.empty(kv_width), requires_grad=False) if bias else None for _ in range(2)
        )
        self.q_norm = self.k_norm = None
        if config.base_model_type == "qwen3":
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = get_rope(self.head_dim, max_position_embeddings, rope_parameters=config.rope_parameters)
        self.attn = LatentCache(
            sum(self.ranks),
            num_heads=self.heads,
            head_size=self.head_dim,
            scale=self.head_dim**-0.5,
            cache_config=cache_config,
            prefix=f"{prefix}.attn",
        )
        self.attn.impl.rebuild = self._rebuilt

    def _ups(self, shapes: list[tuple[int, int]]) -> nn.ParameterDict:
        """Up-projections [heads·d, rank] of the blocks that have any heads."""
        return nn.ParameterDict(
            {
                str(number): nn.Parameter(torch.empty(heads * self.head_dim, rank), requires_grad=False)
                for number, (rank, heads) in enumerate(shapes)
                if heads
            }
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """positions [T], hidden_states [T, D] → [T, D]."""
        query = self.q_proj(hidden_states)[0]
        if self.q_norm is not None:
            query = self.q_norm(query.unflatten(-1, (self.heads, self.head_dim))).flatten(-2)
        query = self.rotary_emb.forward_native(positions, query)[0].unflatten(-1, (self.heads, self.head_dim))
        return self.o_proj(self.attn(query, self.kv_down(hidden_states)[0]))[0]

    def _rebuilt(self, latents: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [B, S, r] of the first S tokens, at positions [B·S] → rotated keys and values [B, G, S, d]."""
        blocks = latents.split(self.ranks, dim=-1)
        key = self._heads(blocks, self.key_up, self.order_of_keys, self.key_bias)
        if self.k_norm is not None:
            key = self.k_norm(key.contiguous())
        turned = self.rotary_emb.forward_native(positions, key.flatten(-2).flatten(0, 1))[0]
        value = self._heads(blocks, self.value_up, self.order_of_values, self.value_bias)
        return turned.view_as(key).transpose(1, 2), value.transpose(1, 2)

    def _heads(self, blocks: tuple[Tensor, ...], ups: nn.ParameterDict, order: Tensor, bias: Tensor | None) -> Tensor:
        """Latents [B, S, ·] of every block → heads in order [B, S, G, d]."""
        heads = torch.cat([nn.functional.linear(blocks[int(number)], up) for number, up in ups.items()], dim=-1)
        heads = heads.unflatten(-1, (-1, self.head_dim)).index_select(2, order)
        return heads if bias is None else heads + bias.view(-1, self.head_dim)


def _order(heads: list[int]) -> Tensor:
    """Index of every head in a list of heads."""
    return torch.tensor(sorted(range(len(heads)), key=heads.__getitem__))
