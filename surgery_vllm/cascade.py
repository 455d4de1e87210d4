"""Caches of low-rank layers that may also read the latents of earlier layers, called a cascade.

Earlier layers have written the new tokens when a later layer runs. It reads their caches again: keeping the latents
that they have read would take memory that vLLM does not account for, and rereading is cheap next to the up-projections
of every layer.

Shapes: T tokens of a batch, B requests of a span, S tokens of the longest, r latent elements of the layer, s of earlier
layers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.models.utils import extract_layer_index

from surgery_vllm.backend import PagedMetadata
from surgery_vllm.rows import RowCache
from surgery_vllm.spans import Span
from surgery_vllm.vector_cache import VectorCache


class CascadeCache(VectorCache):
    """Cache of one layer's latents in the model's dtype, read together with those of earlier layers.

    Args:
        shared_layers: number of preceding layers whose latents are read too.
    """

    def __init__(self, *arguments: Any, shared_layers: int, **settings: Any):
        super().__init__(*arguments, **settings)
        self.earlier = earlier_caches(self.layer_name, shared_layers)

    def read(self, kv_cache: Tensor, metadata: PagedMetadata) -> Iterator[tuple[Span, Tensor]]:
        """Yield the spans of a batch and their latents [B, S, s + r], the layer's own last, in the model's dtype."""
        # Layers may be in different KV cache groups; all divide a batch into the same spans.
        for reads in zip(*(each.read_own() for each in (*self.earlier, self)), strict=True):
            yield reads[-1][0], torch.cat([latents.to(self.kv_cache_torch_dtype) for _, latents in reads], dim=-1)

    def read_own(self) -> Iterator[tuple[Span, Tensor]]:
        """Yield the spans and the latents [B, S, r] of this layer alone."""
        metadata, _, kv_cache, _ = get_attention_context(self.layer_name)
        return super().read(kv_cache, metadata)


class CascadeRows(CascadeCache, RowCache):
    """Packed rows of one layer's residual, after its latents are predicted from those of earlier layers.

    Args:
        shared_down: predicts the layer's latents [T, r] from the dequantized ones of earlier layers [T, s].
        decode: computes outputs [B·T, H, d] of queries [B·T, H, d] of a span by the C++ kernel, from the caches that
            are read, their rows and first tokens; None if the kernel does not support the layer.
    """

    def __init__(
        self,
        *arguments: Any,
        shared_down: Callable[[Tensor], Tensor] | None,
        decode: Callable[..., Tensor] | None,
        **settings: Any,
    ):
        super().__init__(*arguments, **settings)
        self.shared_down, self.decode, self.caches = shared_down, decode, (*self.earlier, self)
        self.in_cpp = decode is not None and self.has_cpp()

    def over_rows(self, query: Tensor, kv_cache: Tensor, span: Span, of_first: Span) -> Tensor:
        rows = [each._rows(kv_cache) for each in self.caches]
        exact = [each._exact(of_first.pages) for each in self.caches] if self.entry.first_tokens else []
        return self.decode(query, self.caches, rows, exact, span)

    def vectors(self, kv_cache: Tensor, span: Span, of_first: Span) -> Tensor:
        """Return the latents [B, S, s + r] of a span, the layer's own last, in the model's dtype."""
        reads = [each.own_vectors(kv_cache, span, of_first) for each in self.caches]
        return torch.cat([latents.to(self.kv_cache_torch_dtype) for latents in reads], dim=-1)

    def write(self, kv_cache: Tensor, vectors: Tensor, metadata: PagedMetadata) -> None:
        """Write the residuals of latents [T, r] of new tokens as rows, and first tokens in full precision as well."""
        if self.earlier:
            shared = torch.cat([each.values_at(kv_cache, metadata.slot_mapping) for each in self.earlier], dim=-1)
            vectors = vectors[: len(shared)] - self.shared_down(shared.to(vectors.dtype))
        super().write(kv_cache, vectors, metadata)


def earlier_caches(name: str, count: int) -> tuple[VectorCache, ...]:
    """Return the caches of the `count` layers before the layer whose cache is `name`.

    Raises:
        ValueError: a cache is in another process.
    """
    layers, number = get_current_vllm_config().compilation_config.static_forward_context, extract_layer_index(name)
    names = [name.replace(f".{number}.", f".{earlier}.", 1) for earlier in range(number - count, number)]
    if any(earlier not in layers for earlier in names):
        raise ValueError(
            f"layer {number} reads the latents of {count} layers before it, some of them in another process; "
            "leave --pipeline-parallel-size out"
        )
    return tuple(layers[earlier] for earlier in names)
