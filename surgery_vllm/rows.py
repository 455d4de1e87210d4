"""Cache of quantized MLA and quantized low-rank layers: packed rows, and first tokens in full precision.

Bytes of a block: :mod:`surgery_vllm.row_layout`; values of a row: :mod:`surgery_vllm.row_values`. Shapes: T tokens of a
batch, B requests of a span, S tokens of the longest, r rank of the latent, ρ width of the shared key (0 in low rank), G
gains of a token (MLA with q/k-norm).

First tokens have separate blocks: space in the blocks of rows would be wasted in all later blocks, and memory outside
of vLLM's blocks would be neither shared by prefix caching nor freed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from surgery.model.blockwise_rows import MOST_QUERIES
from surgery.model.layer_entry import LayerEntry
from surgery.model.token_quantizer import TokenQuantizer
from surgery_vllm import first_tokens
from surgery_vllm.backend import PagedMetadata
from surgery_vllm.paged import gathered, write_slots
from surgery_vllm.row_layout import RowLayout
from surgery_vllm.row_values import first_slots, rows_of, values_at, vectors_of
from surgery_vllm.spans import Span
from surgery_vllm.steps import StepBackend, logged, refusal_of_cpu_kernels
from surgery_vllm.structure import attention_of_layers
from surgery_vllm.vector_cache import Attend, VectorBackend, VectorCache

SMALL_BLOCK = 32
"""Default tokens of a block. Small, since a request takes a whole block for its first tokens and wastes half of one.

vLLM's default of 128 on CPUs serves its own kernels.
"""


class RowQuantizer(TokenQuantizer):
    """Quantizer of a layer with vLLM's weight loading interface."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load steps and means.

        Raises:
            ValueError: invalid values, as in a damaged checkpoint.
        """
        tables, names = dict(self.named_buffers()), set()
        for name, tensor in weights:
            tables[name].copy_(tensor)
            names.add(name)
        self._is_checked = False  # tensors may be loaded one at a time
        self.check()
        return names


class PageCache(VectorCache):
    """Cache in pages of raw bytes that all layers share."""

    def __init__(self, layout: RowLayout, attend: Attend | None, **settings: Any):
        super().__init__(layout.token_bytes, attend, **settings)
        self.layout = layout

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        """Return the spec of one head of bytes: the rows of a token in all layers."""
        spec = super().get_kv_cache_spec(vllm_config)
        return replace(spec, block_size=self.layout.page, dtype=torch.uint8)


class FirstTokens(PageCache):
    """Pages of the first tokens of all layers; written and read by each layer's `RowCache`."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Return the spec of blocks of the same size as those of rows, one per request."""
        rows = super().get_kv_cache_spec(vllm_config)
        sizes = {"num_kv_heads": 1, "head_size": rows.head_size, "head_size_v": 0}
        return first_tokens.FirstTokensSpec(block_size=rows.block_size, dtype=torch.uint8, **sizes)


class RowCache(PageCache):
    """Packed rows of one layer; the first layer owns the pages of rows and of first tokens.

    Args:
        inv_freq: [ρ/2] inverse frequencies of the shared key, fp32; None without a shared key.
    """

    def __init__(
        self, config: Any, quantizer: TokenQuantizer, inv_freq: Tensor | None, attend: Attend, **settings: Any
    ):
        vllm_config = get_current_vllm_config()
        check(vllm_config)
        layers, dtype = attention_of_layers(config), torch.get_default_dtype()
        is_unpacked = self.refusal_of(layers, vllm_config) is None
        unpacked = max(each.value_width + each.rope_dim for each in layers) if is_unpacked else 0
        block = proposed_block(vllm_config.cache_config)
        processes = vllm_config.parallel_config.tensor_parallel_size
        layout = RowLayout.of(layers, config, dtype.itemsize, block, unpacked * dtype.itemsize, processes)
        settings["backend"] = StepBackend if layout.unpacked else VectorBackend
        name = settings.pop("prefix")
        number = extract_layer_index(name)
        owner, first = (each.replace(f".{number}.", ".0.", 1) for each in (name, f"{name}_first"))
        shared = {"kv_sharing_target_layer_name": None if number == 0 else owner}
        super().__init__(layout, attend, prefix=name, **shared, **settings)
        self.number, self.entry = number, layers[number]
        self.quantizer, self.inv_freq, self.first_dtype = quantizer, inv_freq, dtype
        self.fields, self.in_cpp = fields_of(self.entry), False
        self.first_name = first if sum(layout.first) else None
        if self.first_name and number == 0:
            self.first = FirstTokens(layout, None, prefix=first, **settings)

    def refusal_of(self, layers: Sequence[LayerEntry], vllm_config: VllmConfig) -> str | None:
        """Return why no kernel runs the steps of a model's layers; there is none for quantized low-rank layers."""
        return "low rank in bits"

    def has_cpp(self) -> bool:
        """Return whether steps can run in C++: on a CPU, with the kernels compiled; log why not."""
        is_cpu = get_current_vllm_config().device_config.device_type == "cpu"
        return is_cpu and not self.layout.unpacked and logged(refusal_of_cpu_kernels()) is None

    def pack(self, vectors: Tensor) -> Tensor:
        """Pack values and gains [T, r + ρ + G] into rows [T, bytes]."""
        return rows_of(vectors, self.quantizer)

    def write(self, kv_cache: Tensor, vectors: Tensor, metadata: PagedMetadata) -> None:
        """Write values and gains [T, r + ρ + G] of new tokens as rows, and first tokens in full precision as well."""
        write_slots(self._rows(kv_cache), self.pack(vectors), metadata.slot_mapping)
        if self.entry.first_tokens:
            first, pages = self._first()
            slots = first_slots(first.slot_mapping, self.layout.page, self.entry.first_tokens)
            write_slots(pages, vectors[:, : self.entry.format.channels], slots)

    def outputs(self, query: Tensor, kv_cache: Tensor, metadata: PagedMetadata) -> Iterator[tuple[Span, Tensor]]:
        """Yield the spans of a batch and their outputs; few queries of a request read its packed rows in C++."""
        for span, of_first in self.spans(metadata):
            queries = query[span.tokens]
            if self.in_cpp and span.new <= MOST_QUERIES:
                yield span, self.over_rows(queries, kv_cache, span, of_first)
            else:
                vectors = self.vectors(kv_cache, span, of_first)
                yield span, self.attend(queries.to(vectors.dtype), vectors, span)

    def over_rows(self, query: Tensor, kv_cache: Tensor, span: Span, of_first: Span) -> Tensor:
        """Compute outputs [B·T, H, ·] of queries [B·T, H, ·] of a span by a C++ kernel; called if `in_cpp`."""
        raise NotImplementedError

    def vectors(self, kv_cache: Tensor, span: Span, of_first: Span) -> Tensor:
        """Return the vectors [B, S, ·] of a span that attention reads."""
        return self.own_vectors(kv_cache, span, of_first)

    def own_vectors(self, kv_cache: Tensor, span: Span, of_first: Span) -> Tensor:
        """Dequantize the rows of a span to vectors [B, S, v + ρ + G], shared keys rotated, fp32."""
        rows = gathered(self._rows(kv_cache), span.pages)[:, : span.longest]
        exact = self._exact(of_first.pages) if self.entry.first_tokens else None
        return vectors_of(rows, self.quantizer, self.inv_freq, exact, span.seq_lens)

    def spans(self, metadata: PagedMetadata) -> Iterator[tuple[Span, Span]]:
        """Yield the spans of a batch, each with that of first tokens (itself without first tokens)."""
        first = self._first()[0] if self.entry.first_tokens else metadata
        # Both KV cache groups divide a batch into the same spans, since their pages hold equally many tokens.
        return zip(metadata.spans, first.spans, strict=True)

    def _exact(self, pages: Tensor) -> Tensor:
        """Return the first tokens [B, first, r + ρ] of requests, by their block table [B, n] of first tokens."""
        return self._first()[1].index_select(0, pages[:, 0].clamp(min=0))

    def values_at(self, kv_cache: Tensor, slots: Tensor) -> Tensor:
        """Read back the values [T, r + ρ] fp32 of new tokens by their slots [T]."""
        first = pages = None
        if self.entry.first_tokens:
            metadata, pages = self._first()
            first = first_slots(metadata.slot_mapping, self.layout.page, self.entry.first_tokens)
        return values_at(slots, self._rows(kv_cache), self.quantizer, first, pages)

    def _rows(self, kv_cache: Tensor) -> Tensor:
        """Return a view of this layer's rows [pages, tokens of a page, bytes]."""
        layer = kv_cache.view(len(kv_cache), -1)[:, self.layout.rows_of(self.number)]
        return layer.unflatten(1, (self.layout.page, -1))

    def _first(self) -> tuple[PagedMetadata, Tensor]:
        """Return the metadata of first tokens, and a view of this layer's first tokens [pages, first tokens, r + ρ]."""
        metadata, _, kv_cache, _ = get_attention_context(self.first_name)
        layer = kv_cache.view(len(kv_cache), -1)[:, self.layout.first_of(self.number)]
        return metadata, layer.view(self.first_dtype).unflatten(1, (self.entry.first_tokens, -1))


def fields_of(entry: LayerEntry) -> tuple[int, ...]:
    """Return the bit fields of a layer's rows in the flat form that kernels take."""
    return tuple(chain.from_iterable(entry.format.fields()))


def proposed_block(cache_config: CacheConfig) -> int:
    """Return the user's block size in tokens, or vLLM's default, limited to ``SMALL_BLOCK``."""
    is_user_specified = cache_config.user_specified_block_size
    return cache_config.block_size if is_user_specified else min(cache_config.block_size, SMALL_BLOCK)


def check(vllm_config: VllmConfig) -> None:
    """Refuse settings of vLLM with pipeline stages or without the hybrid KV cache manager.

    Raises:
        ValueError: names the setting to change.
    """
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("layers in bits share pages of memory: leave --pipeline-parallel-size out")
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ValueError(
            "layers in bits need vLLM's hybrid KV cache manager: leave out --disable-hybrid-kv-cache-manager"
        )
