"""Cache of one vector per token instead of keys and values, with vLLM's attention backend interfaces.

Shapes: T tokens of a batch, B requests of a span, S tokens of the longest, H query heads, w elements of a query, c
elements of a cached vector.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from surgery_vllm.backend import PagedMetadata
from surgery_vllm.heads_backend import PagedHeadsBackend, PagedImpl
from surgery_vllm.paged import gathered, write_slots
from surgery_vllm.spans import Span

Attend = Callable[[Tensor, Tensor, Span], Tensor]
"""Function of queries [B·T, H, w] and vectors [B, S, c] of a span that returns outputs [B·T, H, ·]."""


class VectorBackend(PagedHeadsBackend):
    """Backend for any device of PyTorch and vectors of any width; no CUDA graphs."""

    @staticmethod
    def get_impl_cls() -> type["VectorImpl"]:
        return VectorImpl


class VectorImpl(PagedImpl):
    """Attention of one layer, which its `VectorCache` implements."""

    def forward(
        self,
        layer: "VectorCache",
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor,
        output_scale: None = None,
        output_block_scale: None = None,
    ) -> Tensor:
        """Write the vectors `key` [T, 1, c] to the cache and the outputs of queries [T, H, w] to `output` [T, H, ·]."""
        if attn_metadata is None:  # profiling run
            return output.zero_()
        layer.write(kv_cache, key.squeeze(1), attn_metadata)
        if steps := attn_metadata.steps:
            output[: len(steps)] = layer.step(query[: len(steps)], kv_cache, attn_metadata)
        for span, outputs in layer.outputs(query, kv_cache, attn_metadata):
            output[span.tokens] = outputs
        return output


class VectorCache(Attention):
    """Cache of one layer: vectors in the model's dtype.

    Args:
        width: c.
        attend: attention of queries over all vectors of their requests.
        backend: `StepBackend` for caches with a `step`.
    """

    def __init__(
        self, width: int, attend: Attend | None, backend: type[VectorBackend] = VectorBackend, **settings: Any
    ):
        super().__init__(num_kv_heads=1, attn_backend=backend, **settings)
        self.width, self.attend = width, attend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Return the spec of one head of c elements, without values."""
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.width,
            head_size_v=0,
            dtype=self.kv_cache_torch_dtype,
        )

    def forward(self, query: Tensor, vectors: Tensor, width: int) -> Tensor:
        """Cache vectors [T, c] and compute outputs [T, H, width] of query [T, H, w]."""
        output, vectors = query.new_empty(*query.shape[:-1], width), vectors.unsqueeze(1)
        # The custom op that vLLM hides from the compiler; `Attention.forward` needs keys as wide as queries.
        name = _encode_layer_name(self.layer_name)
        torch.ops.vllm.unified_attention_with_output(query, vectors, vectors, output, name)
        return output

    def refusal(self) -> str | None:
        """Return why no kernel runs the steps of this loaded layer; None if one does."""

    def write(self, kv_cache: Tensor, vectors: Tensor, metadata: PagedMetadata) -> None:
        """Write the vectors [T, c] of new tokens to the cache [pages, 1, tokens of a page, c]."""
        write_slots(kv_cache[:, 0], vectors, metadata.slot_mapping)

    def outputs(self, query: Tensor, kv_cache: Tensor, metadata: PagedMetadata) -> Iterator[tuple[Span, Tensor]]:
        """Yield the spans of a batch and the outputs [B·T, H, ·] of their queries, of all queries [T, H, w]."""
        for span, vectors in self.read(kv_cache, metadata):
            yield span, self.attend(query[span.tokens].to(vectors.dtype), vectors, span)

    def read(self, kv_cache: Tensor, metadata: PagedMetadata) -> Iterator[tuple[Span, Tensor]]:
        """Yield the spans of a batch and their vectors [B, S, c], arbitrary after the end of a request."""
        for span in metadata.spans:
            yield span, gathered(kv_cache[:, 0], span.pages)
