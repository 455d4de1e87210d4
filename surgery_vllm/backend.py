"""vLLM's interfaces around :mod:`surgery_vllm.paged`: MLA of any width, prompts and steps by one path.

vLLM's own backends for MLA expand the latents of a prompt to keys and values by kernels for four sizes of heads, and
decode at the few widths that theirs were built for. This one reads latents as they are, at any width, of prompts in
pieces or with cached prefixes too.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)

from surgery_vllm.paged import paged_latent_attention, write_slots
from surgery_vllm.spans import Span, spans_of


@dataclass
class PagedMetadata(AttentionMetadata):
    """One batch. ``num_*`` are what ``MLAAttention`` asks for to hand every token to ``forward_mqa``."""

    spans: list[Span]
    slot_mapping: Tensor
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None

    @property
    def decode(self) -> "PagedMetadata":
        return self


class PagedBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Requests that decode come first in a batch, so that they make one span."""

    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        common = common_attn_metadata
        query_lens = common.query_start_loc_cpu.diff().tolist()
        lengths, exact = host_lengths(common, self.vllm_config.speculative_config is not None)
        page = self.kv_cache_spec.block_size
        return PagedMetadata(
            spans=spans_of(query_lens, lengths, common.block_table_tensor, common.seq_lens, page, exact),
            slot_mapping=common.slot_mapping,
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
        )


def host_lengths(common: CommonAttentionMetadata, speculative: bool) -> tuple[list[int], bool]:
    """Tokens of every request as far as the host knows them without a wait, and whether those are exact.

    With speculative decoding vLLM counts every draft as accepted; otherwise its upper bounds are the lengths.
    """
    if common.seq_lens_cpu_upper_bound is None:
        return [common.max_seq_len] * common.num_reqs, False
    return common.seq_lens_cpu_upper_bound.tolist(), not speculative


class PagedLatentBackend(AttentionBackend):
    """Backend of latents for any device that PyTorch runs on; no CUDA graphs."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "SURGERY_LATENT"

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type["PagedLatentImpl"]:
        return PagedLatentImpl

    @staticmethod
    def get_builder_cls() -> type[PagedBuilder]:
        return PagedBuilder


class PagedLatentImpl(MLAAttentionImpl[PagedMetadata]):
    """The attention of one layer; up-projections are `MLAAttention`'s.

    Args:
        rope_dim: ρ, where ``qk_rope_head_dim`` counts the gains in the cache too.
        gains: of those, this process' heads', see :func:`paged_latent_attention`.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        kv_cache_dtype: str,
        kv_lora_rank: int,
        rope_dim: int,
        gains: slice | None = None,
        **more: Any,
    ):
        if is_quantized_kv_cache(kv_cache_dtype):
            raise ValueError(f"--kv-cache-dtype {kv_cache_dtype}: latents are cached as they are, leave it out")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        self.query_width = kv_lora_rank + rope_dim
        self.gains = gains

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """Writes latents [T, r] and what stands behind them, [T, 1, ρ (+ G)], to slots; a negative one is padding."""
        write_slots(kv_cache, torch.cat((kv_c_normed, k_pe.squeeze(1)), dim=-1), slot_mapping.flatten())

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_cache: Tensor, metadata: PagedMetadata, layer: Any
    ) -> tuple[Tensor, None]:
        """q [T, H, r] and [T, H, ρ (+ G)], or both joined → [T, H, r]."""
        query = (torch.cat(q, dim=-1) if isinstance(q, tuple) else q)[..., : self.query_width]
        out = query.new_empty(*query.shape[:-1], self.kv_lora_rank)
        for span in metadata.spans:
            out[span.tokens] = paged_latent_attention(
                query[span.tokens],
                kv_cache,
                span,
                self.kv_lora_rank,
                self.scale,
                self.gains,
            )
        return out, None
