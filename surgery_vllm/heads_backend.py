"""Attention backend of vLLM for :func:`surgery_vllm.paged.paged_head_attention`."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl

from surgery_vllm.backend import PagedBuilder, PagedMetadata
from surgery_vllm.paged import paged_head_attention, write_slots


class PagedHeadsBackend(AttentionBackend):
    """Backend for any device of PyTorch, any head size and any page size; no CUDA graphs."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM accepts only names of its enum

    @staticmethod
    def get_impl_cls() -> type["PagedHeadsImpl"]:
        return PagedHeadsImpl

    @staticmethod
    def get_builder_cls() -> type[PagedBuilder]:
        return PagedBuilder


class PagedImpl(AttentionImpl[PagedMetadata]):
    """Attention over a cache in the model's dtype."""

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
            raise ValueError(f"--kv-cache-dtype {kv_cache_dtype}: not supported by this plugin; leave it out")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale = scale
        self.kv_cache_dtype = kv_cache_dtype


class PagedHeadsImpl(PagedImpl):
    """Attention of a group of heads of one layer.

    Args:
        head_slice: slice of these KV heads among those of all layers in a page.
        sinks, recent: see :func:`paged_head_attention`.
    """

    def __init__(self, *arguments: Any, head_slice: slice, sinks: int, recent: int | None):
        super().__init__(*arguments)
        self.head_slice = head_slice
        self.sinks, self.recent = sinks, recent

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
        """Write key and value [T, G, d] to the cache and the outputs of the queries to `output` [T, H, d]."""
        if attn_metadata is None:  # profiling run
            return output.zero_()
        cache = kv_cache[:, self.head_slice]
        write_slots(cache.transpose(1, 2), torch.cat((key, value), dim=-1), attn_metadata.slot_mapping)
        for span in attn_metadata.spans:
            output[span.tokens] = paged_head_attention(
                query[span.tokens], cache, span, self.scale, self.sinks, self.recent
            )
        return output
