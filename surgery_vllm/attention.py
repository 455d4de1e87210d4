"""Multi-head latent attention of the project's own class, of vLLM's layers.

Formulas, shapes and names of weights: ``surgery/model/latent_attention.py``. Shapes here: T tokens of a batch, H query
heads of this process, d head_dim, r rank of the latent, ρ width of the rotated key, G gains of a token (with q/k-norm).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from vllm.config import CacheConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

from surgery.model.latent_entry import LatentEntry
from surgery_vllm.backend import PagedLatentBackend


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns neighbouring numbers x_{2i}, x_{2i+1} by an angle: x [..., ρ], cos and sin [..., ρ/2] in fp32."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class LatentAttention(nn.Module):
    """One layer. Its cache holds r + ρ numbers a token, and with q/k-norm G more.

    Heads are scored in two parts: d numbers against up-projected latents, ρ rotated ones against the shared key. Both
    come of the same d numbers of the query, the second by `query_rope`.
    """

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
        ranks, heads = get_tensor_model_parallel_world_size(), config.num_attention_heads
        if heads % ranks:
            raise ValueError(f"{heads} query heads do not divide over {ranks} processes")
        hidden, rank, rope = config.hidden_size, latent.kv_lora_rank, latent.rope_dim
        gains = self.key_gains = latent.key_gains(config)
        self.heads = heads // ranks
        self.head_dim = getattr(config, "head_dim", None) or hidden // heads
        self.latent = latent

        self.q_proj = ColumnParallelLinear(hidden, heads * self.head_dim, bias=bias, prefix=f"{prefix}.q_proj")
        self.kv_down = ReplicatedLinear(hidden, rank + rope, bias=bias, prefix=f"{prefix}.kv_down")
        self.query_rope = nn.Parameter(torch.empty(self.heads, self.head_dim, rope), requires_grad=False)
        # For each head the rows that make d numbers of a key of a latent, and those that make a value.
        self.kv_b_proj = ColumnParallelLinear(rank, heads * 2 * self.head_dim, bias=False, prefix=f"{prefix}.kv_b_proj")
        self.o_proj = RowParallelLinear(heads * self.head_dim, hidden, bias=bias_o_proj, prefix=f"{prefix}.o_proj")
        self.gains = None
        if gains:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_proj = ReplicatedLinear(hidden, gains * self.head_dim, bias=bias, prefix=f"{prefix}.k_proj")
            self.gains = self._own_gains(heads // gains)
        inv_freq = torch.tensor(latent.rope_inv_freq, dtype=torch.float32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.mla_attn = MLAAttention(
            num_heads=self.heads,
            scale=self.head_dim**-0.5,
            qk_nope_head_dim=self.head_dim,
            qk_rope_head_dim=rope + gains,  # as the cache has it
            v_head_dim=self.head_dim,
            q_lora_rank=None,
            kv_lora_rank=rank,
            kv_b_proj=self.kv_b_proj,
            cache_config=cache_config,
            prefix=f"{prefix}.attn",
            attn_backend=PagedLatentBackend,
            rope_dim=rope,
            gains=self.gains,
            prefill_backend_cls=CPUSDPAMLAPrefillBackend,  # never called: prompts too go through `forward_mqa`
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """positions [T], hidden_states [T, D] → [T, D]."""
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()  # [T, ρ/2]
        query = self.q_proj(hidden_states)[0].unflatten(-1, (self.heads, self.head_dim))
        if self.gains is not None:
            query = self.q_norm(query)
        turned = torch.einsum("thd,hdk->thk", query, self.query_rope)
        query = torch.cat((query, rotate_pairs(turned, cos[:, None], sin[:, None])), dim=-1)
        latent, key = self.kv_down(hidden_states)[0].split((self.latent.kv_lora_rank, self.latent.rope_dim), dim=-1)
        key = rotate_pairs(key, cos, sin)
        if self.gains is not None:
            query = pad(query, (0, self.key_gains))  # `MLAAttention` wants queries as wide as what is cached
            key = torch.cat((key, self._key_irms(hidden_states)), dim=-1)
        shape = (len(hidden_states), self.heads * self.head_dim)
        return self.o_proj(self.mla_attn(query, latent, key.unsqueeze(1), output_shape=shape))[0]

    def _key_irms(self, hidden_states: Tensor) -> Tensor:
        """Inverse root mean square of the source's keys before their norm: [T, D] → [T, G]."""
        key = self.k_proj(hidden_states)[0].unflatten(-1, (self.key_gains, self.head_dim)).float()
        return torch.rsqrt(key.square().mean(dim=-1) + self.latent.key_norm_eps).to(hidden_states.dtype)

    def _own_gains(self, heads_of_gain: int) -> slice:
        """Return the gains by which the heads of this process are scaled."""
        if self.heads % heads_of_gain:
            raise ValueError(f"{self.heads} query heads of a process are no whole groups of {heads_of_gain}")
        count = self.heads // heads_of_gain
        first = count * get_tensor_model_parallel_rank()
        return slice(first, first + count)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Takes the checkpoint's tensors of this layer; `query_up` and `value_up` fill `query_rope` and `kv_b_proj`."""
        first = self.heads * get_tensor_model_parallel_rank()
        mine = slice(first, first + self.heads)
        up = self.kv_b_proj.weight.data.unflatten(0, (self.heads, 2 * self.head_dim))
        loaded, rest = set(), []
        for name, tensor in weights:
            if name == "query_up":  # [heads, d, r + ρ]
                keys, turned = tensor[mine].split((self.latent.kv_lora_rank, self.latent.rope_dim), dim=-1)
                up[:, : self.head_dim].copy_(keys)
                self.query_rope.data.copy_(turned)
                loaded.add("query_rope")
            elif name == "value_up":  # [heads, d, r]
                up[:, self.head_dim :].copy_(tensor[mine])
                loaded.add("kv_b_proj.weight")
            else:
                rest.append((name, tensor))
        # The loader would drop a bias that no layer has without a word.
        unknown = {name for name, _ in rest} - dict(self.named_parameters()).keys()
        if unknown:
            raise ValueError(f"the checkpoint has {', '.join(sorted(unknown))} in an attention layer that has none")
        return loaded | AutoWeightsLoader(self).load_weights(rest)
