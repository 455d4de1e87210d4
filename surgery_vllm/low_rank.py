"""Low-rank attention, which rebuilds keys of all tokens, and in prompts values, at every step: saves memory, not time.

Formulas and weight names: ``surgery/model/low_rank_attention.py`` and ``quantized_low_rank_attention.py``. Shapes: T
tokens of a batch, S tokens of a request, H query heads and G KV heads of this process, d head_dim, D hidden size, r
latent elements of a token in all blocks, s of earlier layers.
"""

from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CacheConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import AutoWeightsLoader

from surgery.kernels.lowrank_decode.reference import STEP
from surgery.kernels.lowrank_decode.rows import decode_rows, lifted, stacked_heads, transposed_keys
from surgery.model.layer_entry import kv_heads_of
from surgery.model.low_rank_entry import LowRankEntry
from surgery.model.quantized_low_rank_entry import QuantizedLowRankEntry
from surgery_vllm.cascade import CascadeCache, CascadeRows
from surgery_vllm.local_heads import LocalHeads
from surgery_vllm.paged import rebuilt_attention
from surgery_vllm.rows import RowQuantizer
from surgery_vllm.spans import Span


class LowRankAttention(nn.Module):
    """Low-rank attention of one layer."""

    def __init__(
        self,
        config: Any,
        entry: LowRankEntry,
        max_position_embeddings: int,
        cache_config: CacheConfig | None,
        bias: bool,
        bias_o_proj: bool,
        prefix: str,
    ):
        super().__init__()
        blocks, hidden, heads = entry.blocks, config.hidden_size, config.num_attention_heads
        self.local = LocalHeads.of(heads, kv_heads_of(config))
        self.heads = self.local.count
        self.head_dim = getattr(config, "head_dim", None) or hidden // heads
        width = heads * self.head_dim
        # Only a layer with one block reads latents of earlier layers.
        self.widths = [entry.shared_rank + rank for rank in entry.ranks]
        self.q_proj = ColumnParallelLinear(hidden, width, bias=bias, prefix=f"{prefix}.q_proj")
        self.o_proj = RowParallelLinear(width, hidden, bias=bias_o_proj, prefix=f"{prefix}.o_proj")
        self.kv_down = ReplicatedLinear(hidden, sum(entry.ranks), bias=False, prefix=f"{prefix}.kv_down")
        # Rows of the up-projections of all blocks with this process's heads, and index of each head in their output.
        heads_of = {"key_up": [block.keys for block in blocks], "value_up": [block.values for block in blocks]}
        local = range(self.local.kv.start, self.local.kv.stop)
        self.rows = {name: [_rows_of(each, local) for each in of_blocks] for name, of_blocks in heads_of.items()}
        self.key_up, self.value_up = (self._ups([len(rows) for rows in each]) for each in self.rows.values())
        self.orders = [
            _order([head for head in chain.from_iterable(of_blocks) if head in local])
            for of_blocks in heads_of.values()
        ]
        for name, order in zip(("keys", "values"), self.orders, strict=True):
            self.register_buffer(f"order_of_{name}", torch.tensor(order), persistent=False)
        kv_width = self.local.kv_count * self.head_dim
        self.key_bias, self.value_bias = (
            nn.Parameter(torch.empty(kv_width), requires_grad=False) if bias or entry.has_bias else None
            for _ in range(2)
        )
        self.q_norm = self.k_norm = None
        if config.base_model_type == "qwen3":
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = get_rope(self.head_dim, max_position_embeddings, rope_parameters=config.rope_parameters)
        scale = self.head_dim**-0.5
        self.attn = self._cache(
            config,
            entry,
            attend=partial(
                rebuilt_attention,
                scale=scale,
                keys_of=self._keys,
                values_of=self._values,
                values_of_means=self._values_of_means if len(blocks) == 1 else None,
            ),
            shared_layers=entry.shared_layers,
            num_heads=self.heads,
            head_size=self.head_dim,
            scale=scale,
            cache_config=cache_config,
            prefix=f"{prefix}.attn",
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the layer's tensors; of up-projections and their biases only the heads of this process."""
        local = ((name, self._of_this_process(name, tensor)) for name, tensor in weights)
        return AutoWeightsLoader(self).load_weights((name, tensor) for name, tensor in local if len(tensor))

    def _of_this_process(self, name: str, tensor: Tensor) -> Tensor:
        kind, _, block = name.partition(".")
        if kind in self.rows:
            return tensor.unflatten(0, (-1, self.head_dim))[self.rows[kind][int(block)]].flatten(0, 1)
        return self.local.of_kv(tensor, self.head_dim) if kind in ("key_bias", "value_bias") else tensor

    def _cache(self, config: Any, entry: LowRankEntry, **settings: Any) -> CascadeCache:
        return CascadeCache(sum(entry.ranks), **settings)

    def _ups(self, counts: list[int]) -> nn.ParameterDict:
        """Make the up-projections [heads·d, s + rank] of the blocks with heads."""
        return nn.ParameterDict(
            {
                str(number): nn.Parameter(torch.empty(heads * self.head_dim, width), requires_grad=False)
                for number, (width, heads) in enumerate(zip(self.widths, counts, strict=True))
                if heads
            }
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """Compute the output [T, D] of hidden_states [T, D] at positions [T]."""
        query = self.q_proj(hidden_states)[0]
        if self.q_norm is not None:
            query = self.q_norm(query.unflatten(-1, (self.heads, self.head_dim))).flatten(-2)
        query = self.rotary_emb.forward_native(positions, query)[0].unflatten(-1, (self.heads, self.head_dim))
        return self.o_proj(self.attn(query, self.kv_down(hidden_states)[0], self.head_dim).flatten(1))[0]

    def _keys(self, latents: Tensor, positions: Tensor) -> Tensor:
        """Rebuild rotated keys [B, G, S, d] from latents [B, S, s + r] at positions [B·S]."""
        key = self._heads(latents, self.key_up, self.order_of_keys, self.key_bias)
        if self.k_norm is not None:
            key = self.k_norm(key.contiguous())
        turned = self.rotary_emb.forward_native(positions, key.flatten(-2).flatten(0, 1))[0]
        return turned.view_as(key).transpose(1, 2)

    def _values(self, latents: Tensor) -> Tensor:
        """Rebuild values [B, G, S, d] from latents [B, S, s + r]."""
        return self._heads(latents, self.value_up, self.order_of_values, self.value_bias).transpose(1, 2)

    def _values_of_means(self, means: Tensor) -> Tensor:
        """Map weighted latents of the only block [N, H, s + r], by query head, to outputs [N, H, d]."""
        up = self.value_up["0"].unflatten(0, (-1, self.head_dim)).index_select(0, self.order_of_values)
        values = torch.einsum("ngqr,gdr->ngqd", means.unflatten(1, (len(up), -1)), up)
        if self.value_bias is not None:
            values = values + self.value_bias.view(len(up), 1, self.head_dim)
        return values.flatten(1, 2)

    def _heads(self, latents: Tensor, ups: nn.ParameterDict, order: Tensor, bias: Tensor | None) -> Tensor:
        """Up-project latents [B, S, s + r] of all blocks to heads in order [B, S, G, d]."""
        blocks = latents.split(self.widths, dim=-1)
        heads = torch.cat([nn.functional.linear(blocks[int(number)], up) for number, up in ups.items()], dim=-1)
        heads = heads.unflatten(-1, (-1, self.head_dim)).index_select(2, order)
        return heads if bias is None else heads + bias.view(-1, self.head_dim)


class QuantizedLowRankAttention(LowRankAttention):
    """Low-rank attention of one layer whose cache has a packed row per token, and first tokens in full precision."""

    def _cache(self, config: Any, entry: QuantizedLowRankEntry, prefix: str, **settings: Any) -> CascadeRows:
        self.quantizer = RowQuantizer(entry.format)
        name = f"{prefix.removesuffix('.attn')}.shared_down"
        if entry.shared_layers:
            down = ReplicatedLinear(entry.shared_rank, sum(entry.ranks), bias=False, return_bias=False, prefix=name)
            self.shared_down = down
        self.rotation = rotation_of(self.rotary_emb, self.head_dim)
        self.stacked: tuple | None = None
        return CascadeRows(
            config,
            self.quantizer,
            inv_freq=None,
            decode=None if self.rotation is None else self._over_rows,
            shared_down=self.shared_down if entry.shared_layers else None,
            prefix=prefix,
            **settings,
        )

    def _over_rows(
        self, query: Tensor, caches: Sequence[CascadeRows], rows: list[Tensor], exact: list[Tensor], span: Span
    ) -> Tensor:
        """Compute outputs [B·T, H, d] of rotated queries [B·T, H, d] of a span by the C++ kernel, from packed rows."""
        if self.stacked is None:
            self.stacked = self._stacked()
        keys, ranges, value_up = self.stacked
        (pages, lengths), (within, begins) = span.table(), self.rotation
        key_bias, value_bias = (
            None if bias is None else bias.view(-1, self.head_dim) for bias in (self.key_bias, self.value_bias)
        )
        out = decode_rows(
            query.unflatten(0, (len(pages), -1)),
            rows,
            [each.quantizer.step for each in caches],
            [each.quantizer.mean for each in caches],
            exact,
            [each.fields for each in caches],
            keys,
            ranges,
            self.head_dim**-0.5,
            key_bias=key_bias,
            norm_weight=None if self.k_norm is None else self.k_norm.weight,
            norm_eps=0.0 if self.k_norm is None else self.k_norm.variance_epsilon,
            within=within,
            begins=begins,
            lengths=lengths,
            pages=pages,
        )
        return lifted(out.to(value_up.dtype), value_up, value_bias).flatten(0, 1)

    def _stacked(self) -> tuple[Tensor, list[tuple[int, int, int, int]], Tensor]:
        """Return the up-projections of keys for the kernel, the latents of every head, and those of values."""
        spans = [(end - width, width) for end, width in zip(accumulate(self.widths), self.widths, strict=True)]
        (key_up, keys), (value_up, values) = (
            stacked_heads({int(number): up for number, up in ups.items()}, spans, order, self.head_dim)
            for ups, order in zip((self.key_up, self.value_up), self.orders, strict=True)
        )
        return transposed_keys(key_up), [(*key, *value) for key, value in zip(keys, values, strict=True)], value_up


@cache
def rotation_of(rotary: nn.Module, dim: int) -> tuple[Tensor, Tensor] | None:
    """Return vLLM's rotations of whole heads [d] as the `rotation_tables` of kernels; None if they are of another kind.

    The tables compose two rotations, so a rotation by twice as many positions must be one of twice the angles.
    """
    if not rotary.is_neox_style or rotary.rotary_dim != dim:
        return None
    cos, sin = rotary._compute_cos_sin_cache().float().chunk(2, dim=-1)
    turns = torch.complex(cos, sin)
    middle = (len(turns) - 1) // 2
    if not torch.allclose(turns[middle].square(), turns[2 * middle], atol=1e-3):
        return None
    within = torch.nn.functional.pad(torch.stack((cos, sin))[:, :STEP], (0, 0, 0, max(STEP - len(cos), 0)))
    return within, torch.stack((cos, sin))[:, ::STEP].contiguous()


def _rows_of(heads: Sequence[int], local: range) -> list[int]:
    """Return the indices of a process's heads in the list of a block's heads."""
    return [index for index, head in enumerate(heads) if head in local]


def _order(heads: list[int]) -> list[int]:
    """Return the index of every head, ascending, in a list of heads."""
    return sorted(range(len(heads)), key=heads.__getitem__)
