"""Multi-head latent attention of the custom model class, built from vLLM's layers.

Formulas and weight names: ``surgery/model/latent_attention.py``. Shapes: T tokens of a batch, H query heads of this
process, d head_dim, r rank of the latent, ρ width of the rotated key, G gains of a token (with q/k-norm: one for each
KV head of this process).
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CacheConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.models.utils import AutoWeightsLoader

from surgery.kernels.mla_decode.packed_operator import over_values
from surgery.model.head_pairs import HeadPairs
from surgery.model.latent_entry import LatentEntry
from surgery.model.layer_entry import kv_heads_of
from surgery.model.quantized_latent_entry import QuantizedLatentEntry
from surgery_vllm.latent_rows import LatentRows
from surgery_vllm.local_heads import LocalHeads
from surgery_vllm.paged import causal, latent_attention
from surgery_vllm.rows import RowQuantizer
from surgery_vllm.spans import Span
from surgery_vllm.steps import LatentCache
from surgery_vllm.vector_cache import Attend, VectorCache


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent elements x_{2i}, x_{2i+1} as pairs: x [..., ρ], cos and sin [..., ρ/2] in fp32."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class LatentAttention(nn.Module):
    """MLA of one layer, which caches r + ρ elements per token, and G more with q/k-norm."""

    def __init__(
        self,
        config: Any,
        latent: LatentEntry,
        cache_config: CacheConfig | None,
        bias: bool,
        bias_o_proj: bool,
        prefix: str,
    ):
        super().__init__()
        heads, hidden, width = config.num_attention_heads, config.hidden_size, latent.kv_lora_rank + latent.rope_dim
        self.local = LocalHeads.of(heads, kv_heads_of(config))
        self.heads, self.gains = self.local.count, 0
        self.head_dim = getattr(config, "head_dim", None) or hidden // heads
        self.latent = latent

        self.q_proj = ColumnParallelLinear(hidden, heads * self.head_dim, bias=bias, prefix=f"{prefix}.q_proj")
        self.kv_down = ReplicatedLinear(hidden, width, bias=bias, prefix=f"{prefix}.kv_down")
        self.query_up = nn.Parameter(torch.empty(self.heads, self.head_dim, width), requires_grad=False)
        self.value_up = nn.Parameter(torch.empty(self.heads, self.head_dim, latent.value_width), requires_grad=False)
        self.o_proj = RowParallelLinear(heads * self.head_dim, hidden, bias=bias_o_proj, prefix=f"{prefix}.o_proj")
        if latent.key_gains(config):
            self.gains = self.local.kv_count
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_proj = ReplicatedLinear(hidden, self.gains * self.head_dim, bias=bias, prefix=f"{prefix}.k_proj")
        inv_freq = torch.tensor(latent.rope_inv_freq, dtype=torch.float32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        scale = self.head_dim**-0.5
        self.attn = self._cache(
            config,
            attend=partial(latent_attention, rank=latent.value_width, scale=scale),
            num_heads=self.heads,
            head_size=width,
            scale=scale,
            cache_config=cache_config,
            prefix=f"{prefix}.attn",
        )

    def _cache(self, config: Any, **settings: Any) -> VectorCache:
        width = self.latent.kv_lora_rank + self.latent.rope_dim + self.gains
        return LatentCache(width, rank=self.latent.kv_lora_rank, **settings)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Compute the output [T, D] of hidden_states [T, D] at positions [T]."""
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()  # [T, ρ/2]
        query = torch.einsum("thd,hdk->thk", self._queries(hidden_states), self.query_up)
        query, rope = query.split((self.latent.kv_lora_rank, self.latent.rope_dim), dim=-1)
        query = self._over_values(torch.cat((query, rotate_pairs(rope, cos[:, None], sin[:, None])), dim=-1))
        vectors = self._with_gains(self._key(self.kv_down(hidden_states)[0], cos, sin), hidden_states)
        out = self.attn(query, vectors, self.latent.value_width)
        return self.o_proj(torch.einsum("thr,hvr->thv", out, self.value_up).flatten(1))[0]

    def _over_values(self, query: Tensor) -> Tensor:
        """Insert zeros into [..., r + ρ] for the channels [..., v + ρ] that are read for values only."""
        return over_values(query, self.latent.rope_dim, self.latent.value_width - self.latent.kv_lora_rank)

    def _queries(self, hidden_states: Tensor) -> Tensor:
        """Compute unrotated queries [T, H, d]."""
        query = self.q_proj(hidden_states)[0].unflatten(-1, (self.heads, self.head_dim))
        return self.q_norm(query) if self.gains else query

    def _with_gains(self, vectors: Tensor, hidden_states: Tensor) -> Tensor:
        """Append the gains, if any, to vectors [T, r + ρ]."""
        return torch.cat((vectors, self._key_irms(hidden_states)), dim=-1) if self.gains else vectors

    def _key(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the shared keys in vectors [T, r + ρ] by cos and sin [T, ρ/2]."""
        latent, key = vectors.split((self.latent.kv_lora_rank, self.latent.rope_dim), dim=-1)
        return torch.cat((latent, rotate_pairs(key, cos, sin)), dim=-1)

    def _key_irms(self, hidden_states: Tensor) -> Tensor:
        """Compute the inverse rms of the source's keys before their norm: [T, D] → [T, G]."""
        key = self.k_proj(hidden_states)[0].unflatten(-1, (self.gains, self.head_dim)).float()
        return torch.rsqrt(key.square().mean(dim=-1) + self.latent.key_norm_eps).to(hidden_states.dtype)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the layer's tensors; of up-projections and of `k_proj` only the heads of this process."""
        weights = [(name, self._of_this_process(name, tensor)) for name, tensor in weights]
        # The loader would silently drop a bias that the layer does not have.
        unknown = {name for name, _ in weights} - self.state_dict().keys()
        if unknown:
            raise ValueError(f"unexpected attention tensors in the checkpoint: {', '.join(sorted(unknown))}")
        return AutoWeightsLoader(self).load_weights(weights)

    def _of_this_process(self, name: str, tensor: Tensor) -> Tensor:
        if name in ("query_up", "value_up"):
            return tensor[self.local.queries]
        return self.local.of_kv(tensor, self.head_dim) if name.startswith("k_proj.") else tensor


class QuantizedLatentAttention(LatentAttention):
    """MLA of one layer whose cache has a packed row per token, and first tokens in full precision.

    Shared keys are cached before their rotation. If the weights have `HeadPairs`, queries are rotated per head, and
    long prompts read keys and values expanded to heads. All other attention reads latents.
    """

    latent: QuantizedLatentEntry
    order: HeadPairs | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the layer's tensors, and detect whether its keys can be rotated per head."""
        names = super().load_weights(weights)
        self.order = HeadPairs.of(
            self.query_up, self.value_up, self.latent.kv_lora_rank, self.local.kv_count, list(self.latent.rope_inv_freq)
        )
        return names

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Compute the output [T, D] of hidden_states [T, D] at positions [T]."""
        if self.order is None:
            return super().forward(positions, hidden_states)
        query = self._queries(hidden_states)
        angles = positions[:, None, None].float() * self.inv_freq[self.order.pairs]
        turning = self.order.channels[: 2 * len(self.order.pairs)]
        query[..., turning] = rotate_pairs(query[..., turning], angles.cos(), angles.sin())
        vectors = self._with_gains(self.kv_down(hidden_states)[0], hidden_states)
        return self.o_proj(self.attn(query, vectors, self.head_dim).flatten(1))[0]

    def _attend(self, query: Tensor, vectors: Tensor, span: Span, attend_latents: Attend) -> Tensor:
        """Compute outputs [B·T, H, d] of rotated queries [B·T, H, d] over vectors [B, S, v + ρ (+ G)], keys rotated.

        Without `order`, queries and outputs are in latent space. Values are read from the first v = `value_width`.
        """
        if self.order is None or span.new < self.head_dim:
            return self._in_latents(
                query, lambda latent_query: attend_latents(latent_query.to(vectors.dtype), vectors, span)
            )
        group_size = self.heads // self.order.heads
        up, values = self._over_values(self.query_up[::group_size]), self.latent.value_width
        vectors, width = vectors[:, : span.longest].to(up.dtype), up.shape[-1]
        key = torch.einsum("bsc,kdc->bksd", vectors[..., :width], up).contiguous()
        value = torch.einsum("bsr,kvr->bksv", vectors[..., :values], self.value_up[::group_size])
        if self.gains:
            gains = vectors[..., width:].mT.unsqueeze(-1)
            key = key * gains.repeat_interleave(key.shape[1] // self.gains, dim=1)
        return causal(query.to(up.dtype), key, value, span, self.head_dim**-0.5)

    def _in_latents(self, query: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Run `attend`, which maps [T, H, v + ρ] to [T, H, v] in latent space, for rotated queries [T, H, d]."""
        if self.order is None:
            return attend(query)
        sharing = self.heads // self.order.heads  # query heads of a KV head have the same up-projections
        query_up, value_up = self.query_up[::sharing], self.value_up[::sharing]
        query = query.to(query_up.dtype).unflatten(1, (-1, sharing))
        out = attend(self._over_values(torch.einsum("tgqd,gdk->tgqk", query, query_up).flatten(1, 2)))
        out = out.to(value_up.dtype).unflatten(1, (-1, sharing))
        return torch.einsum("tgqr,gvr->tgqv", out, value_up).flatten(1, 2)

    def _cache(self, config: Any, attend: Attend, **settings: Any) -> LatentRows:
        self.quantizer = RowQuantizer(self.latent.format, self.latent.correcting)
        attend = partial(self._attend, attend_latents=attend)
        settings |= {"attend": attend, "in_latents": self._in_latents}
        return LatentRows(config, self.quantizer, self.inv_freq, **settings)

    def _key(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return vectors
